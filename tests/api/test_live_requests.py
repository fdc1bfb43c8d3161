"""AsyncLLM's view of running requests, their changes and their forks, on a real tiny model."""

import asyncio

import pytest

from octavo import SamplingParams
from octavo.api.errors import InvalidRequest, RequestNotFound
from octavo.engine.protocol.requests import BACKGROUND_PRIORITY
from octavo.frontend.changes import Fork
from octavo.frontend.output_processor import KEPT_S, MAX_KEPT, RecentRequests
from tests.support.backend_choice import chosen_backend
from tests.support.llm_tools import LONG, SAMPLED, fingerprint, make_async, prompts_of

(PROMPT,) = prompts_of(37)
SLOW = {"backend": chosen_backend("reference")}
"""Options of an engine whose requests are still running when they are looked at."""


def run(work, **options):
    """Runs a coroutine over a small engine, and closes it."""

    async def main():
        llm = make_async(**{"backend": chosen_backend("native")} | options)
        try:
            return await work(llm)
        finally:
            llm.close()

    return asyncio.run(main())


async def until(stream, count):
    """Reads a stream until it has `count` tokens; returns them."""
    async for output in stream:
        if len(output.outputs[0].token_ids) >= count:
            return output.outputs[0].token_ids
    raise AssertionError("the request ended before")


@pytest.mark.parametrize("in_process", [True, False])
def test_a_fork_is_bitwise_a_fresh_request(in_process):
    """Its tokens and logprobs are those of the prompt with the kept and the forced tokens, while
    the parent runs and after its end; all kept tokens of a running one are found.
    """

    async def work(llm):
        stream = llm.submit({"prompt_token_ids": PROMPT}, LONG, "parent")
        tokens = await until(stream, 25)
        changes = {"temperature": 0.9, "seed": 4, "max_tokens": 9, "logprobs": 2, "top_k": 40}
        forks = [
            await llm.fork("parent", Fork(f"f{kept}", keep=kept, then=[5], changes=changes)).final()
            for kept in (0, 10, 25)
        ]
        await stream.final()
        late = Fork("late", keep=10, then=[5], changes=changes)
        forks.append(await llm.fork("parent", late).final())
        params = SamplingParams(**changes, ignore_eos=True)
        for kept, fork in zip((0, 10, 25, 10), forks, strict=True):
            fresh = llm.submit({"prompt_token_ids": [*PROMPT, *tokens[:kept], 5]}, params)
            assert fingerprint(fork) == fingerprint(await fresh.final())
        assert [fork.num_cached_tokens for fork in forks[:3]] == [37, 47, 62]

    run(work, in_process=in_process)


def test_samples_of_a_fork_differ_and_share():
    async def work(llm):
        stream = llm.submit({"prompt_token_ids": PROMPT}, LONG, "parent")
        await until(stream, 4)
        fork = Fork(
            "fork", keep=4, changes={"temperature": 1.0, "n": 3, "seed": 1, "max_tokens": 8}
        )
        made = await llm.fork("parent", fork).final()
        assert len({tuple(sample.token_ids) for sample in made.outputs}) == 3
        assert made.num_cached_tokens == 40, "the last kept token is computed for its logits"

    run(work)


def test_requests_are_listed_with_state_owner_and_tokens():
    async def work(llm):
        stream = llm.submit(
            {"prompt_token_ids": PROMPT}, LONG, "a", tenant="t", owner="key", deltas=True
        )
        await anext(stream)
        (shown,) = await llm.requests()
        assert (shown.request_id, shown.state, shown.owner) == ("a", "running", "key")
        assert shown.prompt_token_ids == PROMPT and shown.samples[0].token_ids
        assert shown.waits_for == "" and shown.samples[0].num_blocks >= 3
        await llm.abort("a")
        assert (await stream.final()).outputs[0].finish_reason == "abort"
        assert await llm.requests() == []
        (recent,) = await llm.requests(recent=True)
        assert recent.state == "finished" and recent.samples[0].finish_reason == "abort"

    run(work, **SLOW)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_longer_length_is_what_a_fresh_request_gives(in_process):
    async def work(llm):
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=100, ignore_eos=True)
        stream = llm.submit({"prompt_token_ids": PROMPT}, params, "a")
        await until(stream, 5)
        await llm.update("a", max_tokens=140)
        longer = await stream.final()
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=140, ignore_eos=True)
        fresh = await llm.submit({"prompt_token_ids": PROMPT}, params).final()
        assert fingerprint(longer) == fingerprint(fresh) and len(fresh.outputs[0].token_ids) == 140

    run(work, in_process=in_process)


def test_what_cannot_be_changed_or_forked_is_said():
    async def work(llm):
        with pytest.raises(RequestNotFound, match="no request 'none': unknown, or finished"):
            await llm.update("none", max_tokens=3)
        stream = llm.submit({"prompt_token_ids": PROMPT}, LONG, "a")
        tokens = await until(stream, 10)
        with pytest.raises(InvalidRequest, match=r"max_tokens: got 3, expected \d+ to 219"):
            await llm.update("a", max_tokens=3)
        with pytest.raises(InvalidRequest, match="max_tokens: got 220"):
            await llm.update("a", max_tokens=220)
        with pytest.raises(InvalidRequest, match="expected one of max_tokens, priority, stop"):
            await llm.update("a")
        with pytest.raises(InvalidRequest, match="cannot be changed from or to the background"):
            await llm.update("a", priority=BACKGROUND_PRIORITY)
        with pytest.raises(InvalidRequest, match="stop: stop strings require a tokenizer"):
            await llm.update("a", stop="x")
        with pytest.raises(InvalidRequest, match="unknown field 'heat'"):
            llm.fork("a", Fork("f", changes={"heat": 1}))
        with pytest.raises(InvalidRequest, match="then: got"):
            llm.fork("a", Fork("f", then=[1.5]))
        with pytest.raises(InvalidRequest, match="is in use"):
            llm.fork("a", Fork("a"))
        assert (await stream.final()).outputs[0].token_ids[: len(tokens)] == tokens
        with pytest.raises(InvalidRequest, match="has finished; it can only be forked"):
            await llm.update("a", max_tokens=210)
        search = SamplingParams(beam_width=2, n=2, max_tokens=30, temperature=0, ignore_eos=True)
        beams = llm.submit({"prompt_token_ids": PROMPT}, search, "b")
        with pytest.raises(InvalidRequest, match="max_tokens: cannot be changed for a beam search"):
            await llm.update("b", max_tokens=20)
        with pytest.raises(InvalidRequest, match="fork: not supported with beam search"):
            llm.fork("b", Fork("f"))
        (shown,) = await llm.requests()
        assert shown.request_id == "b" and len(shown.samples) == 1
        await beams.final()
        line = llm.submit({"prompt_token_ids": PROMPT}, LONG, "c", priority=BACKGROUND_PRIORITY)
        await until(line, 1)
        with pytest.raises(InvalidRequest, match="cannot be changed from or to the background"):
            await llm.update("c", priority=0)
        await line.aclose()

    run(work, **SLOW)


def test_a_seed_is_not_inherited_by_a_fork():
    async def work(llm):
        stream = llm.submit({"prompt_token_ids": PROMPT}, SAMPLED, "a")
        parent = (await stream.final()).outputs[0].token_ids
        forks = [
            await llm.fork("a", Fork(f"f{i}", keep=0, changes={"temperature": 1.5})).final()
            for i in range(4)
        ]
        answers = {tuple(fork.outputs[0].token_ids) for fork in forks}
        assert len(answers) > 1 and all(len(answer) == len(parent) for answer in answers)

    run(work)


class Ended:
    def __init__(self, ended_at, num_tokens=1):
        self.ended_at, self.num_tokens = ended_at, num_tokens


def test_finished_requests_are_kept_within_bounds_of_time_number_and_tokens():
    recent = RecentRequests()
    for index in range(MAX_KEPT + 10):
        recent.add(str(index), Ended(float(index) / 100))
    assert len(recent.all(3.0)) == MAX_KEPT and recent.find("9", 3.0) is None
    assert recent.find("200", 2 + KEPT_S - 1) is not None
    assert recent.find("200", 2 + KEPT_S + 1) is None
    recent.add("large", Ended(100.0, num_tokens=1 << 21))
    assert recent.all(100.0) == [], "one that is beyond the bound is not kept either"
