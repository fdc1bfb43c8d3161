"""A text of megabytes is refused at once where it cannot fit, and where it might it holds up no
other request.
"""

import asyncio
import re
import shutil
import time

import pytest
from tokenizers import Tokenizer

from octavo.api.errors import ContextTooLong
from tests.support.llm_tools import GREEDY, final, make_async
from tests.support.tiny_tokenizer import tiny_model_with_text

LONG_WORD = "x" * 4000


@pytest.fixture(scope="module")
def long_worded(tmp_path_factory):
    """An engine with a token of 4,000 bytes, so that a text of megabytes may fit by its length."""
    path = tmp_path_factory.mktemp("model")
    shutil.copytree(tiny_model_with_text(), path, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([LONG_WORD])
    tokenizer.save(str(path / "tokenizer.json"))
    llm = make_async(model=str(path), skip_tokenizer_init=False, max_model_len=1024)
    yield llm
    llm.close()


async def longest_pause(coroutine):
    """Runs it; returns its error, how long it took, and the longest that the loop stood still."""
    task = asyncio.ensure_future(coroutine)
    start = last = time.monotonic()
    pause = 0.0
    while not task.done():
        await asyncio.sleep(0.001)
        pause, last = max(pause, time.monotonic() - last), time.monotonic()
    return task.exception(), time.monotonic() - start, pause


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    llm = make_async(model=str(tiny_model_with_text()), skip_tokenizer_init=False)

    async def run():
        text = "the rays of light " * 250_000
        for call in (final(llm, text, GREEDY), llm.tokenize({"prompt": text})):
            error, duration_s, _ = await longest_pause(call)
            assert isinstance(error, ContextTooLong) and duration_s < 0.5
            assert re.search(r"the prompt has at least 5\d{5}; expected at most 255", str(error))
        with pytest.raises(ContextTooLong, match="the prompt has at least"):
            llm.submit(text, GREEDY)
        with pytest.raises(ContextTooLong, match="the prompt has at least"):
            llm.chat_prompt([{"role": "user", "content": text}])

    asyncio.run(run())
    llm.close()


@pytest.mark.parametrize("special", ["", "<|turn|>"])
def test_a_long_text_holds_nobody_up_while_it_is_tokenized(long_worded, special):
    """Another request is answered before it is done, and the loop never stands still for long."""
    llm = long_worded
    text = f"the rays {special} of light" * 40_000
    messages = [{"role": "user", "content": text}]

    async def run():
        await final(llm, "warm", GREEDY)
        for call in (final(llm, text, GREEDY), asyncio.to_thread(llm.chat_prompt, messages)):
            slow = asyncio.ensure_future(longest_pause(call))
            await asyncio.sleep(0.05)
            assert (await final(llm, f"hello {special}", GREEDY)).finished
            quick_s = time.monotonic()
            assert not slow.done()
            error, duration_s, pause_s = await slow
            # A bound relative to the whole: both grow alike on a busy machine.
            assert pause_s < duration_s / 3, (pause_s, duration_s)
            assert time.monotonic() > quick_s
        assert isinstance(error, ContextTooLong) or error is None

    asyncio.run(run())
