"""A sampler of your own: a Python function that changes the logits before each token is sampled.

This one is top-a: it removes tokens whose probability is below A times the square of the highest
probability, so that few tokens are left when the model is certain and many when it is not.

    $ python custom_sampler.py
    [] A lighthouse is a majestic structure that stands alone as a shining beacon ...
    ['top_a'] A lighthouse is a majestic structure that stands watch over the endless sea, ...

Optional argument: the model.
"""

import sys

import numpy as np

from octavo import LLM, SamplingParams

A = 0.2


def top_a(token_ids, logits):
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    logits[probabilities < A * probabilities.max() ** 2] = -np.inf


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    processors = ["top_a=custom_sampler:top_a"]  # NAME=MODULE:FUNCTION
    with LLM(model=model, logits_processors=processors) as llm:
        for names in ([], ["top_a"]):
            params = SamplingParams(temperature=1, seed=1, max_tokens=40, logits_processors=names)
            (output,) = llm.chat([{"role": "user", "content": "Describe a lighthouse."}], params)
            print(names, output.outputs[0].text)
