"""The most likely continuations of a prompt, by beam search, beside the most likely of ten
samples."""

import sys

from octavo import LLM, BeamSearchParams, SamplingParams

PROMPT = "The colours of the rainbow are"

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    (found,) = llm.beam_search(
        [PROMPT], BeamSearchParams(beam_width=4, max_tokens=16, length_penalty=0.5)
    )
    for beam in found.outputs:
        print(f"{beam.cumulative_logprob:8.3f} {beam.text!r}")
    (drawn,) = llm.generate(
        [PROMPT], SamplingParams(n=1, best_of=10, temperature=0.8, seed=1, max_tokens=16)
    )
    print(
        f"{drawn.outputs[0].cumulative_logprob:8.3f} {drawn.outputs[0].text!r} (the best of ten"
        " samples)"
    )
