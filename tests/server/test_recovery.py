"""An engine that is killed or hangs under load: it is replaced, streams go on, nothing is left."""

import asyncio
import os
import random
import signal
import time

import pytest

from tests.support.live_server import LETTERS, LiveServer, runs, until
from tests.support.many_streams import StreamOutcome, all_have, follow, run_streams
from tests.support.processes import anonymous_bytes
from tests.support.tiers import tier
from tests.support.tiny_tokenizer import tiny_model_with_text

HEALTHY_S = 5.0
"""Time in which a replaced engine has to take requests again, in seconds."""
STALL_S = 1.5
NUM_TOKENS = 400
NUM_STREAMS = 16
ENDLESS = {"ignore_eos": True}
FORMED = {"structured_outputs": {"regex": "[a-f ]{900}"}}
WAYS = [ENDLESS, ENDLESS, ENDLESS | {"mirostat_mode": 2}, ENDLESS, FORMED, FORMED, ENDLESS, ENDLESS]
"""Fields of the streams: a new engine rebuilds a matcher from its tokens, and mirostat's bound."""
BODIES = [
    {
        "prompt": f"Stream {index}: " + "once upon a time " * (index % 5),
        "max_tokens": NUM_TOKENS,
        "timings": True,
        **WAYS[index % len(WAYS)],
        **({"temperature": 0} if index % 2 else {"temperature": 1, "seed": index}),
    }
    for index in range(NUM_STREAMS)
]


@pytest.fixture(scope="module")
def server():
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        f"--stall-timeout={STALL_S}",
    )
    yield server
    assert server.stop() == 0
    assert not any("Traceback" in line for line in server.lines)


@pytest.fixture(scope="module")
def undisturbed(server):
    """Tokens of the streams in an engine that nothing happens to."""
    outcomes = run_streams(server, BODIES)
    assert [outcome.error for outcome in outcomes] == [None] * NUM_STREAMS
    return [outcome.token_ids for outcome in outcomes]


def check_nothing_is_left(server):
    """Checks that no request, no block and no second engine remain."""
    assert until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("num_requests_waiting") == 0
    assert server.metric("kv_blocks_held") == 0 == server.metric("kv_block_references")
    assert until(lambda: len([pid for pid in server.children if runs(pid)]) == 1)
    with server.http() as http:
        assert http.get("/load").json()["server_load"] == 0


async def wait_until_healthy(server, hurt):
    """Waits until another engine than the one that was hurt takes requests; returns the seconds
    since the first answer that said it did not.
    """
    began = time.monotonic()
    async with server.async_http() as client:
        while (await client.get("/health")).status_code == 200:
            assert time.monotonic() - began < 60, "nothing was noticed"
            await asyncio.sleep(0.01)
        noticed = time.monotonic()
        while (await client.get("/health")).status_code != 200:
            assert time.monotonic() - noticed < 60
            await asyncio.sleep(0.01)
    assert server.core_pid != hurt
    return time.monotonic() - noticed


def hurt_once(server, sign):
    """Sends a signal to the engine when all streams have begun; notes how long it was gone."""
    times = []

    async def disturb(outcomes):
        await all_have(outcomes, 8)
        assert not any(one.has_ended for one in outcomes), "too late to disturb anything"
        hurt = server.core_pid
        os.kill(hurt, sign)
        times.append(await wait_until_healthy(server, hurt))

    return disturb, times


def check_go_on(outcomes, undisturbed):
    """Checks that streams that met a replacement have the tokens of an undisturbed run."""
    assert [one.error for one in outcomes] == [None] * NUM_STREAMS
    assert [one.token_ids for one in outcomes] == undisturbed
    waits = [one.timings["waits"] for one in outcomes]
    assert any("the engine was restarted" in each for each in waits), "the engine was at work"


@pytest.mark.alone  # the new engine compiles the forms within its stall timeout
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_in_an_engine_that_is_healthy_within_five_seconds(server, undisturbed, sign):
    """An engine that is stopped amid a step counts as one that hangs. The time counts from the
    first answer of /health that says that the engine is gone.
    """
    disturb, times = hurt_once(server, sign)
    check_go_on(run_streams(server, BODIES, disturb), undisturbed)
    check_nothing_is_left(server)
    print(f"healthy after {times[0]:.1f} s")
    assert times[0] < HEALTHY_S


@pytest.mark.alone  # a busy machine's engine would be replaced before it is killed
def test_an_engine_that_is_killed_again_and_again_leaves_nothing_hanging(server, undisturbed):
    """Every stream ends: whole, or with the reason why it was given up."""

    async def disturb(outcomes):
        await all_have(outcomes, 8)
        killed = set()
        for _ in range(3):
            while not (alive := {pid for pid in server.children if runs(pid)} - killed):
                await asyncio.sleep(0.01)
            killed |= alive
            os.kill(alive.pop(), signal.SIGKILL)

    outcomes = run_streams(server, BODIES, disturb)
    assert all(one.has_ended for one in outcomes)
    for one, wanted in zip(outcomes, undisturbed, strict=True):
        if one.error is None:
            assert one.token_ids == wanted
        else:
            assert "given up" in one.error and one.token_ids == wanted[: len(one.token_ids)]
    assert sum(one.error is not None for one in outcomes) <= 3, "one for each death, at most"
    with server.http() as http:
        assert until(lambda: http.get("/health").status_code == 200)
    assert [one.token_ids for one in run_streams(server, BODIES[:2])] == undisturbed[:2]
    check_nothing_is_left(server)


NUM_CUT = {"sample": 100, "all": 1000, "soak": 1000}


def test_streams_that_are_cut_leave_no_block_and_no_memory(server):
    """Half of many streams are left by their clients; the others end, and all memory returns."""
    count = NUM_CUT[tier()]
    draw = random.Random(0)
    bodies = [
        {
            "prompt": f"Stream {index}",
            "max_tokens": 40,
            "seed": index,
            "allowed_token_ids": LETTERS,
            "ignore_eos": True,
        }
        for index in range(count)
    ]
    cut = set(draw.sample(range(count), count // 2))

    async def leave(client, body, num_events):
        """Opens a stream and closes it after some events."""
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as one:
            lines = one.aiter_lines()
            for _ in range(num_events):
                await anext(lines, None)

    async def round_of_streams():
        async with server.async_http() as client:
            kept = {index: StreamOutcome() for index in range(count) if index not in cut}
            await asyncio.gather(
                *(leave(client, bodies[index], draw.randrange(20)) for index in cut),
                *(follow(client, bodies[index], outcome) for index, outcome in kept.items()),
            )
        return kept

    sizes = []
    for _ in range(3):
        kept = asyncio.run(round_of_streams())
        assert all(one.finish_reason == "length" for one in kept.values())
        assert all(len(one.token_ids) == 40 for one in kept.values())
        check_nothing_is_left(server)
        sizes.append(anonymous_bytes(server.process.pid) + anonymous_bytes(server.core_pid))
    assert sizes[2] - sizes[1] < 4 << 20, sizes
