"""Perplexity of a model as Octavo computes it, over a text cut into windows that are each run
alone.

    python benchmarks/perplexity.py --model smollm2 --quantization int8

The text is tests/data/opticks.txt (Newton's Opticks), the recipe opticks.json beside it: windows of
1024 tokens, each behind what the tokenizer puts first (nothing or BOS). The json holds the value
that transformers gives SmolLM2 in fp32, against which the rise is printed; of another model give
--reference float32, to measure it in that precision first. Takes minutes: the logits of every
position are computed.
"""

import argparse
import json
import math
import time
from pathlib import Path

from octavo import LLM, SamplingParams

DATA = Path(__file__).parent.parent / "tests" / "data"


def perplexity(llm: LLM, window: int, num_windows: int | None) -> float:
    """Returns exp of the mean negative logprob of each token after a window's first, given the
    tokens before it in the window.
    """
    tokenizer = llm.get_tokenizer()
    token_ids = tokenizer.encode(
        (DATA / "opticks.txt").read_text(encoding="utf-8"), add_special_tokens=False
    )
    first = tokenizer.encode("")
    windows = [
        token_ids[start : start + window] for start in range(0, len(token_ids) - window + 1, window)
    ][:num_windows]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for output in llm.generate([{"prompt_token_ids": first + ids} for ids in windows], params):
        if output.error or output.prompt_logprobs is None:
            raise SystemExit(f"a window failed: {output.error}")
        for token_id, logprobs in list(
            zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        )[len(first) + 1 :]:
            assert logprobs is not None
            total -= logprobs[token_id].logprob
            count += 1
    return math.exp(total / count)


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
        return perplexity(llm, window, num_windows)


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
    parser.add_argument("--windows", type=int, help="only the first so many of the 20 windows")
    args = parser.parse_args()
    options = {
        "model": args.model,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "backend": args.backend,
    }
    print(json.dumps(measure(args.windows, reference=args.reference, **options)))


if __name__ == "__main__":
    main()
