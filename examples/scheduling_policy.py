"""A scheduling policy of your own: a function that returns the priority of each new request.

This one starts the shortest prompt first. It runs one request at a time to show the order.

    $ python scheduling_policy.py
     5 prompt tokens: The capital of Japan is Tokyo.
    11 prompt tokens: It is a cold day. The opposite of cold is warm.
    19 prompt tokens: I like old towns, good food and long walks by a river. The capital of ...

For a server, put this folder into PYTHONPATH and start it with --scheduling-policy priority
--priority-function scheduling_policy:shortest_prompt.

Optional argument: the model.
"""

import sys

from octavo import LLM, SamplingParams

PROMPTS = [
    "I like old towns, good food and long walks by a river. The capital of Italy is",
    "The capital of Japan is",
    "It is a cold day. The opposite of cold is",
]


def shortest_prompt(request):
    return len(request.prompt_token_ids)  # the lowest number starts first


if __name__ == "__main__":
    with LLM(
        model=sys.argv[1] if len(sys.argv) > 1 else "smollm2",
        scheduling_policy="priority",
        priority_function="scheduling_policy:shortest_prompt",  # MODULE:FUNCTION
        max_num_seqs=1,
    ) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20, stop="."))
        for output in sorted(outputs, key=lambda output: output.metrics.scheduled_ts):
            text = f"{output.prompt}{output.outputs[0].text}."
            print(f"{len(output.prompt_token_ids):2} prompt tokens: {text}")
