"""Perplexity of a model as Octavo computes it, over a text cut into windows that are each run alone.

    python benchmarks/perplexity.py --model smollm2 --quantization int8

The text is tests/data/opticks.txt (Newton's Opticks), the recipe opticks.json beside it: 20 windows of 1024 tokens, no BOS. The json
holds the value that transformers gives in fp32, against which the rise is printed. Takes minutes: the logits of every position
are computed.
"""

import argparse
import json
import math
import time
from pathlib import Path

from octavo import LLM, SamplingParams

DATA = Path(__file__).parent.parent / "tests" / "data"


def perplexity(llm: LLM, token_ids: list[int], window: int) -> float:
    """exp of the mean negative logprob of each token after a window's first, given those before it in the window."""
    windows = [token_ids[start : start + window] for start in range(0, len(token_ids) - window + 1, window)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for output in llm.generate([{"prompt_token_ids": ids} for ids in windows], params):
        if output.error or output.prompt_logprobs is None:
            raise SystemExit(f"a window failed: {output.error}")
        for token_id, logprobs in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert logprobs is not None
            total -= logprobs[token_id].logprob
            count += 1
    return math.exp(total / count)


def measure(num_windows: int | None = None, **options: object) -> dict[str, object]:
    """The figure for one set of engine options, and its rise over fp32 (over the same windows)."""
    recipe = json.loads((DATA / "opticks.json").read_text())
    window = recipe["window"]
    with LLM(enable_prefix_caching=False, max_model_len=2 * window, report=lambda text: None, **options) as llm:
        token_ids = llm.get_tokenizer().encode((DATA / "opticks.txt").read_text(encoding="utf-8"), add_special_tokens=False)
        began = time.perf_counter()
        found = perplexity(llm, token_ids[: window * num_windows] if num_windows else token_ids, window)
    nlls = recipe["per_window_mean_nll"][:num_windows]
    expected = math.exp(sum(nlls) / len(nlls))
    rise = round(100 * (found / expected - 1), 4)
    return {
        **options,
        "perplexity": round(found, 4),
        "fp32": round(expected, 4),
        "rise_percent": rise,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--windows", type=int, help="only the first so many of the 20 windows")
    args = parser.parse_args()
    options = {"model": args.model, "dtype": args.dtype, "quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    print(json.dumps(measure(args.windows, **options)))


if __name__ == "__main__":
    main()
