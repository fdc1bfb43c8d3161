"""The prefix cache: the second request with the same system prompt computes only its own part."""

import sys

from octavo import LLM, SamplingParams

system = "You are a careful assistant. " + "Answer in one short sentence. " * 20
params = SamplingParams(temperature=0, max_tokens=12)
with LLM(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    for question in ("What is the capital of France?", "What is the opposite of cold?"):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        (output,) = llm.chat([messages], params)
        print(f"{output.outputs[0].text!r}")
        print(
            f"  {output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
        )
