"""Share of a sampled decode step that the draw takes, for each instruction-set level.

    python benchmarks/draw.py [--levels avx2 avx512] [--requests 32] [--top-k 0] [--top-p 1.0]

Two vocabularies: SmolLM2's own weights (49k tokens), and random weights in the shape of
Qwen2.5-0.5B (152k), whose logits are flatter than a model's, so that no token is too far below the
best. Greedy and sampled rounds take turns. Prints one JSON line for each level and vocabulary:
milliseconds of a greedy and of a sampled step (medians), what sampling adds to a step as a share of
it, and the share of all ops' time that the profile gives the draw.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.executor.native.extension import supported_levels

QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
"""config.json of Qwen2.5-0.5B, as far as its shape needs it."""


def round_s(llm: LLM, params: SamplingParams, num_requests: int) -> float:
    """Returns the seconds of one decode step with all requests running."""
    prompts = [[100 + request] for request in range(num_requests)]
    started = time.perf_counter()
    llm.generate(prompts, params)
    return (time.perf_counter() - started) / (params.max_tokens or 1)


def measure(llm: LLM, args: argparse.Namespace) -> dict[str, float]:
    """Returns the row of one model at one level."""
    common: dict[str, Any] = {"max_tokens": args.tokens, "ignore_eos": True}
    greedy = SamplingParams(temperature=0, **common)
    sampled = SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=1, **common
    )
    times: dict[str, list[float]] = {"greedy": [], "sampled": []}
    round_s(llm, sampled, args.requests)
    for _ in range(args.rounds):
        times["greedy"].append(round_s(llm, greedy, args.requests))
        times["sampled"].append(round_s(llm, sampled, args.requests))
    llm.start_profile()
    round_s(llm, sampled, args.requests)
    ops = {op.name: op.seconds for op in llm.stop_profile().ops}
    greedy_s, sampled_s = (statistics.median(times[name]) for name in ("greedy", "sampled"))
    return {
        "greedy_ms": round(1e3 * greedy_s, 3),
        "sampled_ms": round(1e3 * sampled_s, 3),
        "added_share": round(1 - greedy_s / sampled_s, 4),
        "draw_share": round(ops["sample"] / sum(ops.values()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--levels", nargs="*", default=supported_levels())
    parser.add_argument("--threads", type=int)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--vocabularies", nargs="*", choices=["49k", "152k"], default=["49k", "152k"]
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN))
        models: dict[str, dict[str, Any]] = {
            "49k": {"model": "smollm2"},
            "152k": {
                "model": folder,
                "load_format": "dummy",
                "skip_tokenizer_init": True,
            },
        }
        for level in args.levels:
            for vocabulary in args.vocabularies:
                with LLM(
                    **models[vocabulary],
                    cpu_level=level,
                    threads=args.threads,
                    max_model_len=512,
                    max_num_seqs=args.requests,
                    kv_cache_memory_bytes="256MiB",
                    report=lambda text: None,
                ) as llm:
                    row = {"level": level, "vocabulary": vocabulary, **measure(llm, args)}
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
