"""llama.cpp's kinds of guesses on prompts of token ids, through the package xllamacpp, one stream,
greedy, the prompts cached. Reads a job as JSON from standard input (benchmarks/speculation.py) and
prints a JSON line for each work and kind: medians of the rounds.
"""

import json
import statistics
import sys
import time
from typing import Any

import xllamacpp

KINDS = ("NONE", "NGRAM_SIMPLE", "NGRAM_MAP_K", "NGRAM_MAP_K4V", "NGRAM_MOD", "NGRAM_CACHE")


def server_of(job: dict[str, Any], kind: str) -> Any:
    """Starts a server with one kind of guesses."""
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_parallel = 1
    params.n_ctx = 4096
    params.cpuparams.n_threads = job["threads"]
    params.cpuparams_batch.n_threads = job["threads"]
    params.warmup = False
    kinds = xllamacpp.common_speculative_type
    params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    if kind.startswith("DRAFT"):
        params.speculative.draft.mparams.path = job["draft"]
        params.speculative.draft.cpuparams.n_threads = job["threads"]
    return xllamacpp.Server(params)


def rate_of(server: Any, prompt: list[int], num_tokens: int) -> float:
    """Returns the tokens/s of an answer."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "cache_prompt": True}
    began = time.perf_counter()
    answer = server.handle_completions(body)
    return int(answer["usage"]["completion_tokens"]) / (time.perf_counter() - began)


def main() -> None:
    job = json.load(sys.stdin)
    known = dir(xllamacpp.common_speculative_type)
    kinds = [kind for kind in KINDS if f"COMMON_SPECULATIVE_TYPE_{kind}" in known]
    if job["draft"]:
        kinds.append("DRAFT_SIMPLE")
    for kind in kinds:
        server = server_of(job, kind)
        for work, prompt in job["prompts"].items():
            rate_of(server, prompt, 1)
            rates = [rate_of(server, prompt, job["tokens"]) for _ in range(job["rounds"])]
            row = {"work": work, "streams": 1, "method": f"llama.cpp {kind.lower()}"}
            row |= {"tokens_per_s": round(statistics.median(rates), 1)}
            row |= {"range": [round(min(rates), 1), round(max(rates), 1)]}
            print(json.dumps(row), flush=True)
        del server


if __name__ == "__main__":
    main()
