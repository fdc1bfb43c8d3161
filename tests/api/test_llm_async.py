"""AsyncLLM: many streams at once, over a core in a thread and over one in a process of its own."""

import asyncio
import os
import signal

import pytest

from octavo import AsyncLLM, SamplingParams
from octavo.api.errors import ConfigError, ContextTooLong, EngineDead, InvalidRequest, Overloaded
from octavo.config.engine_config import EngineConfig
from octavo.utils.progress import quiet
from octavo.wiring.engine import build_with_process
from tests.support.llm_tools import (
    GREEDY,
    LONG,
    alone,
    final,
    fingerprint,
    make_async,
    make_llm,
    prompts_of,
    small_options,
)
from tests.support.tiny_tokenizer import tiny_model_with_text


@pytest.fixture(params=[True, False], ids=["thread", "process"])
def llm(request):
    llm = make_async(in_process=request.param)
    yield llm
    llm.close()


async def settled(llm):
    """Tells whether the engine ends every request and frees every block within some seconds."""
    for _ in range(500):
        if (
            llm.num_unfinished == 0
            and (await final(llm, [3], GREEDY))
            and llm.stats().num_running == llm.stats().num_used_blocks == 0
        ):
            return True
        await asyncio.sleep(0.01)
    return False


def test_concurrent_streams_equal_one_by_one(llm):
    prompts = prompts_of(1, 16, 30, 47)

    async def run():
        return await asyncio.gather(*(final(llm, prompt, GREEDY) for prompt in prompts))

    outputs = asyncio.run(run())
    with make_llm() as offline:
        assert [fingerprint(output) for output in outputs] == [
            alone(offline, prompt, GREEDY) for prompt in prompts
        ]


def test_beams_and_the_best_of_several_come_at_the_end(llm):
    """A beam search has one output, the final one; leaving before it aborts the search."""
    beams = SamplingParams(n=2, beam_width=3, max_tokens=12)
    best = SamplingParams(n=2, best_of=4, temperature=1.2, seed=4, max_tokens=12)
    prompts = prompts_of(20, 7)
    with make_llm() as plain:
        expected = plain.generate(prompts, [beams, best])

    async def main():
        streams = [
            [output async for output in llm.generate(prompt, params)]
            for prompt, params in zip(prompts, (beams, best), strict=True)
        ]
        assert [[output.outputs for output in outputs] for outputs in streams] == [
            [output.outputs] for output in expected
        ]
        task = asyncio.create_task(
            final(llm, prompts[0], SamplingParams(beam_width=3, max_tokens=200, ignore_eos=True))
        )
        await asyncio.sleep(0.05)
        task.cancel()
        assert await settled(llm)

    asyncio.run(main())


def test_deltas_add_up_to_the_whole(llm):
    """Deltas add up for a reader that reads at once and for one that skips; a sample that has ended
    before the others is not told twice.
    """
    params = SamplingParams(
        n=3, temperature=1, seed=5, max_tokens=24, logprobs=1, stop_token_ids=list(range(0, 320, 9))
    )
    prompt = prompts_of(9)[0]

    async def run():
        whole = await llm.submit(prompt, params).final()
        assert len({len(sample.token_ids) for sample in whole.outputs}) > 1
        for pause_s in (0, 0.02):
            parts = []
            async for output in llm.submit(prompt, params, deltas=True):
                parts.append(output)
                await asyncio.sleep(pause_s)
            assert parts[-1].finished and len(parts[-1].outputs) == 3
            for index, sample in enumerate(whole.outputs):
                gained = [part.outputs[index] for part in parts]
                assert [
                    token_id for one in gained for token_id in one.token_ids
                ] == sample.token_ids
                assert [entry for one in gained for entry in one.logprobs] == sample.logprobs
                assert "".join(one.text for one in gained) == sample.text
                assert (gained[-1].finish_reason, gained[-1].stop_reason) == (
                    sample.finish_reason,
                    sample.stop_reason,
                )

    asyncio.run(run())


def test_leaving_a_stream_aborts_its_request(llm):
    async def run():
        stream = llm.generate(prompts_of(5)[0], LONG)
        async for _ in stream:
            break
        await stream.aclose()
        assert llm.num_unfinished == 0
        assert await settled(llm)

    asyncio.run(run())


def test_cancelling_a_task_aborts_its_request(llm):
    async def run():
        task = asyncio.create_task(final(llm, prompts_of(5)[0], LONG))
        while llm.num_unfinished == 0:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await settled(llm)

    asyncio.run(run())


def test_one_event_loop_after_another_may_use_it(llm):
    first, second = (asyncio.run(final(llm, [5, 6], GREEDY)) for _ in range(2))
    assert fingerprint(first) == fingerprint(second)

    async def run():
        await final(llm, [5], GREEDY)
        with pytest.raises(InvalidRequest, match="belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, final(llm, [5], GREEDY))

    asyncio.run(run())


def test_abort_gives_the_stream_its_end(llm):
    async def run():
        stream = llm.submit(prompts_of(5)[0], LONG, "mine")
        outputs = []
        async for output in stream:
            outputs.append(output)
            if len(outputs) == 2:
                await llm.abort("mine")
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
        await llm.abort("mine")
        await llm.abort("unknown")

    asyncio.run(run())


def test_a_name_can_be_used_again_at_once(llm):
    async def run():
        for _ in range(20):
            await anext(left := llm.submit(prompts_of(5)[0], LONG, "mine"))
            await left.aclose()
            again = await llm.submit(prompts_of(5)[0], GREEDY, "mine").final()
            assert again.outputs[0].finish_reason == "length"

    asyncio.run(run())


def test_faults_are_raised_before_anything_runs(llm):
    async def run():
        with pytest.raises(ContextTooLong):
            llm.submit(prompts_of(300)[0], GREEDY)
        with pytest.raises(InvalidRequest, match="got the token id 999"):
            llm.submit([999], GREEDY)
        stream = llm.submit([5], GREEDY, "twice")
        with pytest.raises(InvalidRequest, match="request_id: 'twice' is in use"):
            llm.submit([5], GREEDY, "twice")
        assert [output async for output in stream][-1].finished

    asyncio.run(run())


def test_the_prefix_cache_can_be_reset(llm):
    async def run():
        prompt = prompts_of(40)[0]
        await final(llm, prompt, GREEDY)
        assert (await final(llm, prompt, GREEDY)).num_cached_tokens == 32
        assert await llm.reset_prefix_cache()
        assert (await final(llm, prompt, GREEDY)).num_cached_tokens == 0

    asyncio.run(run())


def test_a_full_queue_is_refused():
    llm = make_async(max_num_seqs=1, max_num_queued_reqs=2)

    async def run():
        streams = [llm.submit([5], LONG) for _ in range(3)]
        with pytest.raises(
            Overloaded, match="the queue is full: 2 requests are waiting, expected at most 2"
        ):
            llm.submit([5], GREEDY)
        for stream in streams:
            await stream.aclose()
        assert (await final(llm, [5], GREEDY)).finished

    asyncio.run(run())
    llm.close()


def test_a_request_that_would_be_too_late_is_refused():
    llm = make_async(max_predicted_ttft_s=1e-9)

    async def run():
        assert (await final(llm, [5], GREEDY)).finished, "nothing is predicted before a step"
        with pytest.raises(
            Overloaded, match=r"first token would take about .* expected at most 1e-09 s"
        ):
            llm.submit([5], GREEDY)
        assert llm.limits.rejections == {"latency": 1}

    asyncio.run(run())
    llm.close()


def test_closing_ends_the_streams(llm):
    async def run():
        stream = llm.submit([5], LONG)
        await anext(stream)
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineDead, match="the engine was closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDead):
            llm.check_health()

    asyncio.run(run())


def test_streams_outlive_their_engines_process():
    """Another engine continues the streams of one that died, with the tokens that they would have
    got.
    """
    frontend = build_with_process(EngineConfig.from_options(**small_options()), quiet)
    llm = AsyncLLM(frontend)
    prompts = [[5], [6]]

    async def run():
        streams = [llm.submit(prompt, LONG) for prompt in prompts]
        await anext(streams[0])
        os.kill(frontend.client.pid, signal.SIGKILL)
        return [await stream.final() for stream in streams]

    outputs = asyncio.run(run())
    assert llm.stats().num_restarts == 1
    llm.close()
    with make_llm() as offline:
        assert [fingerprint(output) for output in outputs] == [
            alone(offline, prompt, LONG) for prompt in prompts
        ]


def test_what_cannot_be_sent_to_the_engine_is_refused_and_forgotten():
    llm = make_async(in_process=False)

    async def run():
        with pytest.raises(InvalidRequest):
            llm.submit([5], SamplingParams(max_tokens=10**30))
        with pytest.raises(InvalidRequest):
            llm.submit([5], GREEDY, tenant=5)
        assert llm.num_unfinished == 0
        assert (await final(llm, [5], GREEDY)).finished

    asyncio.run(run())
    llm.close()


@pytest.mark.parametrize("in_process", [True, False])
def test_what_keeps_it_from_starting_is_raised(in_process):
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes: got 10\.0 KiB, expected"):
        make_async(in_process=in_process, kv_cache_memory_bytes="10KiB")


def test_the_start_is_reported_from_the_process():
    lines = []
    llm = make_async(in_process=False, report=lines.append)
    llm.close()
    assert lines[0].startswith("loading ") and lines[-1].startswith("KV cache ")
    assert llm.info.description == lines[-1]


def test_text_and_stop_strings():
    llm = make_async(model=str(tiny_model_with_text()), skip_tokenizer_init=False)
    ids = [llm.get_tokenizer().encode(letter, add_special_tokens=False)[0] for letter in "abcd"]

    async def run():
        params = SamplingParams(
            temperature=1, seed=2, max_tokens=20, allowed_token_ids=ids, ignore_eos=True
        )
        whole = (await final(llm, "Hello", params)).outputs[0].text
        stop = whole[6:9]
        cut = (
            await final(
                llm,
                "Hello",
                SamplingParams(
                    temperature=1, seed=2, max_tokens=20, allowed_token_ids=ids, stop=stop
                ),
            )
        ).outputs[0]
        assert (cut.text, cut.finish_reason, cut.stop_reason) == (
            whole.split(stop)[0],
            "stop",
            stop,
        )
        prompt = llm.chat_prompt([{"role": "user", "content": "hi"}])
        assert len((await final(llm, prompt, params)).outputs[0].text) == 20
        assert await settled(llm)

    asyncio.run(run())
    llm.close()
