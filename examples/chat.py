"""A conversation, its answer streamed word by word, offline."""

import sys

from octavo import LLM, SamplingParams

messages = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    shown = 0
    for output in llm.stream(
        llm.chat_prompt(messages), SamplingParams(temperature=0, max_tokens=40)
    ):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()
