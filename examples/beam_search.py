r"""Beam search: the most likely continuations of a prompt, next to the greedy one.

    $ python beam_search.py
      -9.36 ' to start with the basics and gradually expand your skill set as you become ...
     -10.47 ' to start with the basics and gradually expand your skill set. This can be done'
     -10.48 ' to start with the basics and gradually expand your skill set as you become ...
     -10.52 ' to start with the basics and gradually expand your skill set. Start with ...
     -14.54 " to start with the basics.\n\nFirst, you'll need to prepare a" (greedy)

Optional argument: the model.
"""

import sys

from octavo import LLM, BeamSearchParams, SamplingParams

PROMPT = "The best way to learn to cook is"

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    (found,) = llm.beam_search([PROMPT], BeamSearchParams(beam_width=4, max_tokens=16))
    params = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=16, logprobs=0)
    (greedy,) = llm.generate([PROMPT], params)
    for beam in found.outputs:
        print(f"{beam.cumulative_logprob:7.2f} {beam.text!r}")
    print(f"{greedy.outputs[0].cumulative_logprob:7.2f} {greedy.outputs[0].text!r} (greedy)")
