"""vLLM (CPU build) under LoRA adapters: tokens/s of as many streams as each work names adapters.
Reads a job as JSON from standard input (benchmarks/adapters.py) and prints `RESULT` and a JSON
object: for each work the tokens/s of each round.
"""

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    job = json.load(sys.stdin)
    works: dict[str, list[Any]] = {
        name: [LoRARequest(*one) if one else None for one in adapters]
        for name, adapters in job["works"].items()
    }
    streams = max(map(len, works.values()))
    ids = {one.lora_int_id for adapters in works.values() for one in adapters if one}
    adapted = {"enable_lora": True, "max_loras": streams, "max_lora_rank": job["rank"]}
    # All of them in memory, so that only the first round reads files.
    adapted |= {"max_cpu_loras": max(streams, len(ids))}
    llm = LLM(
        job["model"],
        max_model_len=1024,
        max_num_seqs=streams,
        enable_prefix_caching=False,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        **(adapted if job["enable_lora"] else {}),
        **job["options"],
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]

    def seconds(adapters: list[Any], num_tokens: int) -> float:
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        named = adapters if any(adapters) else None
        began = time.perf_counter()
        llm.generate(prompts, params, lora_request=named, use_tqdm=False)
        return time.perf_counter() - began

    rates: dict[str, list[float]] = {name: [] for name in works}
    for number in range(job["rounds"] + 1):
        for name, adapters in works.items():
            # Adapters of this work take the places of those before it in a step of their own.
            seconds(adapters, 1)
            if number:
                first_s = seconds(adapters, 1)
                spent_s = seconds(adapters, job["tokens"]) - first_s
                rates[name].append(len(adapters) * (job["tokens"] - 1) / spent_s)
    print("RESULT " + json.dumps(rates), flush=True)


if __name__ == "__main__":
    main()
