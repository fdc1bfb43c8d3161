"""Automatic prefix caching: the second chat with the same system prompt computes only its own part.

    $ python prefix_cache.py
    0 of 148 prompt tokens from the cache
    The capital of France is Paris.
    138 of 148 prompt tokens from the cache
    The opposite of cold is heat.

Optional argument: the model.
"""

import sys

from octavo import LLM, SamplingParams

QUESTIONS = ["Name the capital of France.", "What is the opposite of cold?"]
SYSTEM = "You are a careful assistant. " + "Answer in one short sentence. " * 20
PARAMS = SamplingParams(temperature=0, max_tokens=20)

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    for question in QUESTIONS:
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        (output,) = llm.chat(chat, PARAMS)
        num_prompt_tokens = len(output.prompt_token_ids)
        print(output.num_cached_tokens, "of", num_prompt_tokens, "prompt tokens from the cache")
        print(output.outputs[0].text)
