"""vLLM (CPU build) with one kind of guesses, or none, on prompts of token ids: one stream, greedy,
the prompts cached. Reads a job as JSON from standard input (benchmarks/speculation.py) and prints a
JSON line for each work: medians of the rounds.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
}
"""`speculative_config` of each kind, with the values that vLLM's documentation takes."""


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    kind = KINDS[job["kind"]]
    llm = LLM(
        job["model"],
        max_model_len=2048,
        max_num_seqs=16,
        disable_log_stats=True,
        **({"speculative_config": kind} if kind else {}),
        **job["options"],
    )

    def rate_of(prompt: list[int], num_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        began = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return len(done[0].outputs[0].token_ids) / (time.perf_counter() - began)

    for work, prompt in job["prompts"].items():
        rate_of(prompt, 1)
        rates = [rate_of(prompt, job["tokens"]) for _ in range(job["rounds"])]
        row = {"work": work, "streams": 1, "method": f"vllm {job['kind']}"}
        row |= {"tokens_per_s": round(statistics.median(rates), 1)}
        row |= {"range": [round(min(rates), 1), round(max(rates), 1)]}
        print("RESULT " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
