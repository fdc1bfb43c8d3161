"""vLLM (CPU build) on the standard work. Options: JSON of vllm.LLM keywords."""

import json
import os

from work import arguments, measure

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")


def main() -> None:
    from vllm import LLM, SamplingParams

    model, requests, prompt, output, options = arguments()
    llm = LLM(
        model,
        max_model_len=2048,
        enable_prefix_caching=False,
        disable_log_stats=True,
        max_num_seqs=max(requests, 64),
        **json.loads(options),
    )

    def run(prompts: list[list[int]], num_output: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(request.outputs[0].token_ids) for request in done)

    measure(run, requests, prompt, output)


if __name__ == "__main__":
    main()
