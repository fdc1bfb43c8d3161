"""Greedy answers of vLLM (CPU build) to prompts of token ids: MODEL and the number of tokens are
arguments, a JSON list of prompts comes on standard input, the lists of ids go to standard output
behind `ANSWERS `.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main() -> None:
    from vllm import LLM, SamplingParams

    model, num_tokens = sys.argv[1], int(sys.argv[2])
    prompts = [{"prompt_token_ids": ids} for ids in json.load(sys.stdin)]
    llm = LLM(
        model,
        max_model_len=1024,
        max_num_seqs=16,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        disable_log_stats=True,
        skip_tokenizer_init=True,
    )
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    done = llm.generate(prompts, params, use_tqdm=False)
    print("ANSWERS " + json.dumps([list(each.outputs[0].token_ids) for each in done]))


if __name__ == "__main__":
    main()
