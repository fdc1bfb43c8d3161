"""Many requests in flight from one asyncio program; each is answered as soon as it is done,
whatever the others do.
"""

import asyncio
import sys

from octavo import AsyncLLM, SamplingParams


async def ask(llm: AsyncLLM, prompt: str, num_tokens: int) -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=num_tokens)
    async for output in llm.generate(prompt, params):
        if output.finished:
            print(f"{num_tokens:3} tokens: {output.outputs[0].text!r}")


async def main() -> None:
    llm = AsyncLLM.from_options(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    await asyncio.gather(*(ask(llm, "Once upon a time", num_tokens) for num_tokens in (24, 16, 8)))
    llm.close()


asyncio.run(main())
