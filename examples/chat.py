"""Stream a chat response word by word, in Python without a server.

    $ python chat.py
    The capital of France is Paris.

Optional argument: the model.
"""

import sys

from octavo import LLM, SamplingParams

messages = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Name the capital of France."},
]

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    prompt = llm.chat_prompt(messages)
    num_shown = 0
    for output in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=40)):
        text = output.outputs[0].text  # the text so far
        print(text[num_shown:], end="", flush=True)
        num_shown = len(text)
    print()
