"""A logits processor: a Python function that changes the logits before each token is sampled.

This one bans all tokens that the text already contains.
"""

import sys

from octavo import LLM, SamplingParams


def no_repeats(token_ids, logits):
    logits[token_ids] = -float("inf")


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    processors = ["no_repeats=custom_sampler:no_repeats"]  # NAME=MODULE:FUNCTION
    with LLM(model=model, logits_processors=processors) as llm:
        params = SamplingParams(temperature=0, max_tokens=16, logits_processors=["no_repeats"])
        (output,) = llm.generate("The capital of Italy is", params)
        print(output.outputs[0].text)
        token_ids = output.outputs[0].token_ids
        assert len(set(token_ids)) == len(token_ids)
