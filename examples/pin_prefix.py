"""Pin a system prompt: it stays in the prefix cache on disk, also across restarts.

    $ python pin_prefix.py
    128 tokens pinned for an hour
    128 of 148 prompt tokens from the cache
    The capital of France is Paris.

Optional argument: the model.
"""

import sys
import tempfile

from octavo import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
SYSTEM = "You are a careful assistant. " + "Answer in one short sentence. " * 20
SYSTEM_MESSAGE = {"role": "system", "content": SYSTEM}

with tempfile.TemporaryDirectory() as folder:
    with LLM(model=MODEL, prefix_cache_dir=folder) as llm:
        prompt = llm.chat_prompt([SYSTEM_MESSAGE], add_generation_prompt=False)
        print(llm.pin_prefix(prompt, ttl_s=3600), "tokens pinned for an hour")

    with LLM(model=MODEL, prefix_cache_dir=folder) as llm:  # a restart
        question = {"role": "user", "content": "Name the capital of France."}
        params = SamplingParams(temperature=0, max_tokens=20)
        (output,) = llm.chat([SYSTEM_MESSAGE, question], params)
        num_prompt_tokens = len(output.prompt_token_ids)
        print(output.num_cached_tokens, "of", num_prompt_tokens, "prompt tokens from the cache")
        print(output.outputs[0].text)
