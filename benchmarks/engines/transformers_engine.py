"""transformers' generate on the standard work, one static batch. Options: the dtype, e.g.
bfloat16."""

import torch
from transformers import AutoModelForCausalLM
from work import arguments, measure

model, requests, prompt, output, dtype = arguments()
network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()


def run(prompts: list[list[int]], num_output: int) -> int:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        made = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=num_output,
            max_new_tokens=num_output,
            do_sample=False,
            pad_token_id=2,
        )
    return (made.shape[1] - ids.shape[1]) * len(prompts)


measure(run, requests, prompt, output)
