"""Complete several prompts in one batch.

    $ python generate.py
    The capital of France is Paris.
    The capital of Italy is Rome.
    The opposite of cold is warm.

Optional argument: the model.
"""

import sys

from octavo import LLM, SamplingParams

prompts = ["The capital of France is", "The capital of Italy is", "The opposite of cold is"]

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    params = SamplingParams(temperature=0, max_tokens=20, stop="\n")
    for output in llm.generate(prompts, params):
        print(output.prompt + output.outputs[0].text)
