"""Forms of AsyncLLM's requests: a new one is compiled while other requests are served, and one that
cannot be kept is refused before anything runs.
"""

import asyncio
import threading

import pytest

from octavo import SamplingParams, StructuredOutputs
from octavo.api.errors import InvalidRequest
from octavo.text.grammar import admission
from tests.support.llm_tools import GREEDY, final, make_async, prompts_of
from tests.support.tiny_tokenizer import tiny_model_with_text


@pytest.fixture
def llm():
    llm = make_async(in_process=True, model=str(tiny_model_with_text()), skip_tokenizer_init=False)
    yield llm
    llm.close()


def formed(text: str) -> SamplingParams:
    return SamplingParams(
        max_tokens=30, temperature=0, structured_outputs=StructuredOutputs(choice=[text, "other"])
    )


def test_a_new_form_is_compiled_beside_the_event_loop(llm, monkeypatch):
    may_admit, asked = threading.Event(), threading.Event()
    admit = admission.admit

    def held_up(form, compiler):
        asked.set()
        assert may_admit.wait(60), "the event loop waits for the compiler"
        return admit(form, compiler)

    monkeypatch.setattr(admission, "admit", held_up)

    async def run():
        (prompt,) = prompts_of(5)
        task = asyncio.create_task(final(llm, prompt, formed("one")))
        while not asked.is_set():
            await asyncio.sleep(0.005)
        other = await final(llm, prompt, GREEDY)
        assert other.outputs[0].token_ids and not task.done()
        may_admit.set()
        found = await task
        assert found.outputs[0].text in ("one", "other")

    asyncio.run(run())


def test_a_form_that_cannot_be_kept_starts_nothing(llm):
    async def run():
        with pytest.raises(InvalidRequest, match="#/not"):
            bad = SamplingParams(structured_outputs=StructuredOutputs(json={"not": {}}))
            await final(llm, prompts_of(5)[0], bad)
        assert llm.num_unfinished == 0

    asyncio.run(run())
