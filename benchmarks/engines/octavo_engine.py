"""Octavo on the standard work. Options: JSON of LLM keywords, e.g. {"quantization": "int8"}. Prefix
caching is off, as in the peers.
"""

import json

from work import arguments, measure

from octavo import LLM, SamplingParams

model, requests, prompt, output, options = arguments()
decoding = [0.0]
llm = LLM(model, enable_prefix_caching=False, report=lambda text: None, **json.loads(options))


def run(prompts: list[list[int]], num_output: int) -> int:
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    metrics = done[0].metrics
    decoding[0] = metrics.last_token_ts - metrics.first_token_ts
    return sum(len(request.outputs[0].token_ids) for request in done)


measure(run, requests, prompt, output, lambda: decoding[0])
