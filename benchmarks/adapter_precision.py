"""What the precision that adapters are kept in costs: perplexity under ones that were trained.

    python benchmarks/adapter_precision.py [--model smollm2] [--rank 16] [--steps 60]
    python benchmarks/adapter_precision.py --adapters DIRECTORY --dtype auto

PEFT trains two adapters on the part of Newton's Opticks (tests/data) that lies behind the windows
that are judged, one window a step, seeded: of all linears, and of queries and values alone. Octavo
then computes the judged windows, without an adapter and under each as every `--lora-dtype` keeps
it. `rise_percent` is that of the perplexity over the adapter's in float32, `difference` the mean
absolute difference of a token's logprob from float32's. `peft` is PEFT's own model in float32.

The base is computed in float32, where only the adapter differs, and as its file has it (`auto`).
There rows are rounded to 8 bits if the weights have 8 or fewer, and another adapter, however close,
rounds them another way: the differences are those of two roundings.

Takes about five minutes of two cores and needs the extra `dev`; with --adapters what was trained
into that directory before is used again. Nothing is timed, so other work may run beside it. Prints
a JSON line for each figure.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from compare import machine
from numpy.typing import NDArray

from octavo import LLM, LoRARequest, SamplingParams
from octavo.checkpoint.open import open_checkpoint
from octavo.config.engine_config import EngineConfig
from octavo.text.tokenizer import load_tokenizer
from octavo.wiring.model import open_model

BOOK = Path(__file__).parent.parent / "tests" / "data" / "opticks.txt"
WINDOW, NUM_WINDOWS = 1024, 5
"""Size in tokens and number of the windows that are judged, as in the tests of quantized models."""
TRAINED_TOKENS = 256
"""Tokens of a step of the training."""
SITES: dict[str, str | list[str]] = {"all": "all-linear", "q, v": ["q_proj", "v_proj"]}
LEARNING_RATE = 1e-3
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
"""Bytes of a number as each precision keeps it."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32,auto", help="of the base, with commas")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--adapters", type=Path, help="directory that keeps what is trained")
    args = parser.parse_args()
    print(json.dumps({"machine": machine(), **vars(args)}, default=str), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = train_adapters(args.model, args.rank, args.steps, args.adapters or Path(folder))
        for dtype in args.dtype.split(","):
            for row in measure(work, dtype, judged_windows(args.model)):
                print(json.dumps(row), flush=True)


# -- training --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A model, and the folders of the adapters that were trained on it, by name."""

    model: str
    rank: int
    folders: dict[str, Path]


def train_adapters(model: str, rank: int, steps: int, root: Path) -> Work:
    """Trains the adapters of all SITES that `root` does not have."""
    behind = np.array(book_ids(model)[WINDOW * NUM_WINDOWS :])
    if len(behind) < steps * TRAINED_TOKENS:
        allowed = len(behind) // TRAINED_TOKENS
        raise SystemExit(f"--steps: got {steps}, the book has text for at most {allowed}")
    windows = behind[: steps * TRAINED_TOKENS].reshape(steps, TRAINED_TOKENS)
    folders = {}
    for name, sites in SITES.items():
        folders[name] = root / f"{name.replace(', ', '')}-{rank}-{steps}"
        if not (folders[name] / "adapter_model.safetensors").exists():
            losses = train(network_of(model), sites, rank, windows, folders[name])
            row = {"trained": name, "first_losses": losses[:4], "last_losses": losses[-4:]}
            print(json.dumps(row), flush=True)
    return Work(model, rank, folders)


def train(
    network: torch.nn.Module,
    sites: str | list[str],
    rank: int,
    windows: NDArray[np.int64],
    folder: Path,
) -> list[float]:
    """Trains an adapter, a window `[T]` of ids a step, and saves it; returns the losses."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=sites, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(network, config)
    numbers = [each for each in adapted.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(numbers, LEARNING_RATE)
    losses = []
    for window in windows:
        ids = torch.from_numpy(window)[None]
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the base has no name
        adapted.save_pretrained(folder)
    return losses


def network_of(model: str) -> torch.nn.Module:
    """Returns transformers' network with a checkpoint's weights, dequantised to float32."""
    checkpoint = open_checkpoint(model_path(model))
    given = {name: value for name, value in checkpoint.config.items() if value is not None}
    config = transformers.AutoConfig.for_model(**given)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {
        name: torch.from_numpy(checkpoint.tensor(name).dequantize().copy())
        for name in checkpoint.names()
    }
    missing, unexpected = network.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"{model}: transformers expects other weights: {missing}, {unexpected}")
    network.tie_weights()
    return network


def book_ids(model: str) -> list[int]:
    """Returns the token ids of the whole book."""
    source = open_checkpoint(model_path(model)).tokenizer_source()
    if source is None:
        raise SystemExit(f"{model} has no tokenizer")
    text = BOOK.read_text(encoding="utf-8")
    return list(load_tokenizer(source).encode(text, add_special_tokens=False))


def model_path(model: str) -> Path:
    return Path(open_model(EngineConfig.from_options(model=model)).checkpoint.path)


# -- perplexity ------------------------------------------------------------------------------------


def judged_windows(model: str, num_windows: int = NUM_WINDOWS) -> list[list[int]]:
    """Returns the token ids of the book's first windows."""
    ids = book_ids(model)[: WINDOW * num_windows]
    return [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]


def measure(work: Work, dtype: str, windows: Sequence[list[int]]) -> Iterator[dict[str, Any]]:
    """Yields the figures of a base, and of each adapter in each precision on it."""
    base = {"base": dtype}
    exact: dict[str, NDArray[np.float64]] = {}
    for lora_dtype, num_bytes in NUMBER_BYTES.items():
        with engine(work, dtype, lora_dtype) as llm:
            if not exact:
                yield base | {"adapter": None} | figures(logprobs_of(llm, windows, None))
            for number, (name, folder) in enumerate(work.folders.items()):
                found = logprobs_of(llm, windows, LoRARequest(name, number + 1, str(folder)))
                row = base | {"adapter": name, "lora_dtype": lora_dtype}
                row |= {"adapter_mb": round(num_numbers(folder) * num_bytes / 1e6, 2)}
                yield row | figures(found, exact.setdefault(name, found))
    for name, folder in work.folders.items():
        found = peft_logprobs(work.model, folder, windows)
        yield base | {"adapter": name, "engine": "peft"} | figures(found, exact[name])


def engine(work: Work, dtype: str, lora_dtype: str) -> LLM:
    """Makes an engine that keeps adapters in a precision."""
    options: dict[str, Any] = {"model": work.model, "dtype": dtype, "max_model_len": WINDOW + 8}
    options |= {"enable_prefix_caching": False, "report": lambda text: None}
    return LLM(**options, enable_lora=True, max_lora_rank=work.rank, lora_dtype=lora_dtype)


def figures(
    logprobs: NDArray[np.float64], exact: NDArray[np.float64] | None = None
) -> dict[str, float]:
    """Returns the perplexity, and what the precision changes where `exact` are float32's."""
    found = {"perplexity": round(math.exp(-logprobs.mean()), 4)}
    if exact is not None:
        rise = math.exp(exact.mean() - logprobs.mean()) - 1
        difference = np.abs(logprobs - exact).mean()
        found |= {"rise_percent": round(100 * rise, 4), "difference": float(f"{difference:.2g}")}
    return found


def logprobs_of(
    llm: LLM, windows: Sequence[list[int]], adapter: LoRARequest | None
) -> NDArray[np.float64]:
    """Returns the logprob of each token behind the first of its window, `[T]`."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": ids} for ids in windows]
    found: list[float] = []
    for output in llm.generate(prompts, params, lora_request=adapter, use_tqdm=False):
        if output.error or output.prompt_logprobs is None:
            raise SystemExit(f"a window failed: {output.error}")
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        found += [each[token_id].logprob for token_id, each in pairs if each is not None]
    return np.array(found)


def peft_logprobs(model: str, folder: Path, windows: Sequence[list[int]]) -> NDArray[np.float64]:
    """Returns what `logprobs_of` does, of PEFT's own model in float32."""
    adapted = peft.PeftModel.from_pretrained(network_of(model), str(folder)).eval()
    found = []
    for window in windows:
        ids = torch.tensor(window)
        with torch.inference_mode():
            logits = adapted(input_ids=ids[None]).logits[0, :-1]
        found.append(-torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").numpy())
    return np.concatenate(found).astype(np.float64)


def num_numbers(folder: Path) -> int:
    """Returns how many numbers an adapter's matrices have; PEFT saves them in float32."""
    return (folder / "adapter_model.safetensors").stat().st_size // NUMBER_BYTES["float32"]


if __name__ == "__main__":
    main()
