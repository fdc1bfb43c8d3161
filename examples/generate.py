"""Several prompts at once, offline."""

import sys

from octavo import LLM, SamplingParams

prompts = ["The capital of France is", "Water boils at", "The opposite of cold is"]

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
