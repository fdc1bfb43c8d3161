"""Perplexity of a model as Octavo computes it, over a text cut into windows that are each run
alone.

    python benchmarks/perplexity.py --model smollm2 --quantization int8

The text is tests/data/opticks.txt (Newton's Opticks), the recipe opticks.json beside it: windows of
1024 tokens, each behind what the tokenizer puts first (nothing or BOS). The json holds the value
that transformers gives SmolLM2 in fp32, against which the rise is printed; of another model give
--reference float32, to measure it in that precision first. Takes minutes: the logits of every
position are computed.

    python benchmarks/perplexity.py --windows 4 --generated \
        --activation-sparsity 0.25 --calibration FILE

With --generated the second half of each window is generated, token by token as the text has it, so
that options which change generated tokens alone are seen; the value is that of the second halves,
and so is the one it is compared with, which the same engine gives without these options.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.tools.bench.perplexity import perplexity

DATA = Path(__file__).parent.parent / "tests" / "data"


def generated_perplexity(llm: LLM, window: int, num_windows: int | None) -> float:
    """Returns exp of the mean negative logprob of the second half of each window, where the first
    half is the prompt and the model generates what the text has.
    """
    tokenizer = llm.get_tokenizer()
    token_ids = tokenizer.encode(
        (DATA / "opticks.txt").read_text(encoding="utf-8"), add_special_tokens=False
    )
    first = tokenizer.encode("")
    windows = [
        first + token_ids[start : start + window]
        for start in range(0, len(token_ids) - window + 1, window)
    ][:num_windows]
    half = len(first) + window // 2
    params = SamplingParams(
        temperature=0,
        max_tokens=window - window // 2,
        ignore_eos=True,
        logprobs=0,
        logits_processors=["follow"],
    )
    import forced_text

    for ids in windows:
        forced_text.learn(ids)
    total, count = 0.0, 0
    outputs = llm.generate([{"prompt_token_ids": ids[:half]} for ids in windows], params)
    for ids, output in zip(windows, outputs, strict=True):
        sample = output.outputs[0]
        if output.error or sample.token_ids != ids[half:] or sample.logprobs is None:
            raise SystemExit(f"a window was not followed: {output.error}")
        for token_id, logprobs in zip(sample.token_ids, sample.logprobs, strict=True):
            total -= logprobs[token_id].logprob
            count += 1
    return math.exp(total / count)


def measure_generated(num_windows: int | None = None, **options: object) -> dict[str, object]:
    """Measures one set of engine options on generated tokens, and the rise over the same engine
    that leaves nothing out.
    """
    window = json.loads((DATA / "opticks.json").read_text())["window"]
    dense = {name: value for name, value in options.items() if name not in SPARSITY}
    sys.path.append(str(Path(__file__).parent))
    found = []
    for each in (dense, options):
        with LLM(
            enable_prefix_caching=False,
            max_model_len=2 * window,
            report=lambda text: None,
            logits_processors=["forced_text:follow"],
            logits_processor_timeout=60,
            **each,
        ) as llm:
            found.append(generated_perplexity(llm, window, num_windows))
    return {
        **options,
        "perplexity": round(found[1], 4),
        "dense": round(found[0], 4),
        "rise_percent": round(100 * (found[1] / found[0] - 1), 4),
    }


SPARSITY = (
    *("activation_sparsity", "activation_sparsity_plan", "ffn_sparsity", "calibration"),
    *("sparsity_predictor", "predicted_share", "kv_selection", "kv_budget"),
)
"""Options that change generated tokens alone."""


def measure(
    num_windows: int | None = None, *, reference: str | None = None, **options: object
) -> dict[str, object]:
    """Measures one set of engine options: perplexity, and its rise over SmolLM2's in fp32 or over
    the same model's in the dtype `reference`.
    """
    recipe = json.loads((DATA / "opticks.json").read_text())
    if reference is None:
        nlls = recipe["per_window_mean_nll"][:num_windows]
        expected = math.exp(sum(nlls) / len(nlls))
    else:
        expected = _run(
            recipe["window"], num_windows, {**options, "quantization": None, "dtype": reference}
        )
    began = time.perf_counter()
    found = _run(recipe["window"], num_windows, options)
    return {
        **options,
        "perplexity": round(found, 4),
        reference or "fp32": round(expected, 4),
        "rise_percent": round(100 * (found / expected - 1), 4),
        "seconds": round(time.perf_counter() - began, 1),
    }


def _run(window: int, num_windows: int | None, options: dict[str, object]) -> float:
    with LLM(
        enable_prefix_caching=False, max_model_len=2 * window, report=lambda text: None, **options
    ) as llm:
        text = (DATA / "opticks.txt").read_text(encoding="utf-8")
        return perplexity(llm, text, window, num_windows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument(
        "--reference", help="a dtype to compare with, for models other than smollm2"
    )
    parser.add_argument("--backend")
    parser.add_argument("--windows", type=int, help="how many of the 20 windows, from the first")
    parser.add_argument("--generated", action="store_true", help="second halves are generated")
    for name in SPARSITY:
        parser.add_argument(f"--{name.replace('_', '-')}")
    args = parser.parse_args()
    options = {
        "model": args.model,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "backend": args.backend,
    }
    options |= {name: value for name in SPARSITY if (value := getattr(args, name)) is not None}
    if args.generated:
        print(json.dumps(measure_generated(args.windows, **options)))
    else:
        print(json.dumps(measure(args.windows, reference=args.reference, **options)))


if __name__ == "__main__":
    main()
