"""LoRA adapters side by side: one prompt, answered by the base model and by each adapter.

The adapters are directories in PEFT's format, trained on the model. All requests run in one batch.

    $ python lora_swap.py MODEL ADAPTER ADAPTER
"""

import sys

from octavo import LLM, LoRARequest, SamplingParams

PROMPT = "The sea"

if len(sys.argv) < 3:
    sys.exit("usage: python lora_swap.py MODEL ADAPTER...")
adapters = [None]
for number, path in enumerate(sys.argv[2:], start=1):
    adapters.append(LoRARequest(f"adapter-{number}", number, path))

with LLM(model=sys.argv[1], enable_lora=True, max_loras=2, max_lora_rank=64) as llm:
    params = SamplingParams(temperature=0, max_tokens=20)
    outputs = llm.generate([PROMPT] * len(adapters), params, lora_request=adapters)
    for adapter, output in zip(adapters, outputs, strict=True):
        print(f"{adapter.lora_path if adapter else 'base'}: {output.outputs[0].text!r}")
