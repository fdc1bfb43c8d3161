"""Run many requests at once from asyncio; each ends when it is done, whatever the others do.

    $ python many_at_once.py
    8 tokens: 'The capital of France is Paris.'
    21 tokens: 'In the heart of the night, a gentle rain falls, a silent companion that never ...
    52 tokens: "1. Red: This is the most obvious colour and it's also the most vibrant. ...

Optional argument: the model.
"""

import asyncio
import sys

from octavo import AsyncLLM

QUESTIONS = ["Name three colours.", "Name the capital of France.", "Write a haiku about rain."]


async def ask(llm: AsyncLLM, question: str) -> None:
    prompt = llm.chat_prompt([{"role": "user", "content": question}])
    params = llm.get_default_chat_params()  # the values that the model recommends
    async for output in llm.generate(prompt, params):
        if output.finished:
            print(f"{len(output.outputs[0].token_ids)} tokens: {output.outputs[0].text!r}")


async def main() -> None:
    llm = AsyncLLM.from_options(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    await asyncio.gather(*(ask(llm, question) for question in QUESTIONS))
    llm.close()


asyncio.run(main())
