"""Prompts that another engine computes: their answers are bitwise those of one engine, whatever
becomes of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections import Counter
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from octavo import AsyncLLM, SamplingParams
from octavo.api.errors import BackendUnavailable, ConfigError
from octavo.config.engine_config import EngineConfig
from octavo.distributed.disaggregation import remote_prefill as prefill_peers
from octavo.distributed.transfer.block_sender import BlockSender
from octavo.distributed.transfer.send_buffer import SendBuffer
from octavo.engine.protocol.kv_messages import BlockHashWithGroupId
from octavo.utils.progress import quiet
from octavo.wiring.engine import build_with_process
from octavo.worker.model_runner import ModelRunner
from tests.support.llm_tools import (
    GREEDY,
    LONG,
    final,
    fingerprint,
    make_async,
    make_llm,
    prompts_of,
    small_options,
)
from tests.support.transfer_pairs import (
    MODELS,
    PARAMS,
    PROMPTS,
    expected,
    free_address,
    met,
    note_asked,
    num_requests,
    pair,
)

LONGER = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)


def mooncake() -> None:
    """Skips a test where Mooncake's transfer engine is not installed."""
    pytest.importorskip("mooncake.engine", reason="mooncake is not installed", exc_type=ImportError)


def nixl() -> None:
    """Skips a test where NIXL is not installed."""
    pytest.importorskip("nixl._api", reason="nixl is not installed", exc_type=ImportError)


@pytest.mark.parametrize("transport", ["zmq", "zmq in messages", "mooncake", "nixl"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model[0]}-{model[1]}")
def test_answers_are_those_of_one_engine(model, transport):
    """The decoding engine computes no more than the last tokens of a long prompt, and all of a
    short one; a prompt that comes again is found in its own cache.
    """
    transport, _, in_messages = transport.partition(" ")
    if transport != "zmq":
        (mooncake if transport == "mooncake" else nixl)()

    async def run() -> None:
        await met(prefill, decode)
        for _ in range(2):
            outputs = await asyncio.gather(*map(final, [decode] * 4, PROMPTS, PARAMS))
            assert [fingerprint(output) for output in outputs] == answers
        cached = [output.num_cached_tokens for output in outputs]
        assert cached == [112, 128, 16, 192]

    answers = expected(model)
    secret = "of both" if in_messages else None
    with pair(model, kv_transfer=transport, kv_transfer_secret=secret) as (prefill, decode):
        asyncio.run(run())
        stats = decode.stats().connector
        assert stats.num_not_fetched == 0
        assert stats.num_fetched == stats.num_loaded > 0
        assert stats.num_fetched * 16 >= 112 + 128 + 192


@pytest.mark.parametrize("model", MODELS[:3], ids=lambda model: f"{model[0]}-{model[1]}")
def test_the_blocks_of_the_last_step_leave_in_layers(model, monkeypatch):
    """Each prompt has three steps, which begin once its blocks are asked for. The last one's blocks
    come as its layers are written, those of the others whole, and none of them twice.
    """
    prompts, may_begin, asked = prompts_of(180, 150), threading.Event(), threading.Event()
    layers: Counter[BlockHashWithGroupId] = Counter()
    whole: Counter[BlockHashWithGroupId] = Counter()
    run, wait = ModelRunner.run, SendBuffer.wait
    send_layer, send_block = BlockSender.send_layer, BlockSender.send_block

    def run_later(one, step):
        assert not may_begin.is_set() or asked.wait(20), "no block was asked for"
        return run(one, step)

    def note_ask(one, ask, wanted, until):
        refused = wait(one, ask, wanted, until)
        asked.set()
        return refused

    def note_layer(one, ask, names, offset, data):
        layers.update(names)
        send_layer(one, ask, names, offset, data)

    def note_block(one, ask, name, data):
        whole[name] += 1
        send_block(one, ask, name, data)

    monkeypatch.setattr(ModelRunner, "run", run_later)
    monkeypatch.setattr(SendBuffer, "wait", note_ask)
    monkeypatch.setattr(BlockSender, "send_layer", note_layer)
    monkeypatch.setattr(BlockSender, "send_block", note_block)

    async def ask() -> None:
        await met(prefill, decode)
        may_begin.set()
        for prompt, answer in zip(prompts, answers, strict=True):
            asked.clear()
            assert fingerprint(await final(decode, prompt, GREEDY)) == answer

    answers = expected(model, prompts, GREEDY)
    with pair(model, max_num_batched_tokens=64) as (prefill, decode):
        asyncio.run(asyncio.wait_for(ask(), 60))
        stats = decode.stats().connector
        assert stats.num_not_fetched == 0
        groups = {name.group for name in whole}
        assert {name.group for name in layers} == groups
        for group in groups:  # each block once in each layer
            assert len({num for name, num in layers.items() if name.group == group}) == 1
        if len(groups) == 1:  # of a window's group fewer are asked for
            assert len(layers) == 3 + 1  # those that end at 144 to 176, and at 144
        assert not layers.keys() & whole.keys() and set(whole.values()) == {1}
        assert len(layers) + len(whole) == stats.num_fetched
        assert prefill.stats().connector.stored.num_expired_leases == 0


def test_what_the_peer_found_in_its_own_cache_is_sent_too():
    """The peer has computed the prompts for itself before."""
    answers = expected(MODELS[0])

    async def run() -> None:
        await met(prefill, decode)
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            await final(prefill, prompt, params)
        assert await decode.reset_prefix_cache(reset_connector=True)
        outputs = await asyncio.gather(*map(final, [decode] * 4, PROMPTS, PARAMS))
        assert [fingerprint(output) for output in outputs] == answers

    with pair(MODELS[0]) as (prefill, decode):
        asyncio.run(run())
        assert decode.stats().connector.num_not_fetched == 0
        assert decode.stats().prefix_hit_tokens == 112 + 128 + 192


def test_a_prompt_that_is_cached_here_is_not_sent(monkeypatch):
    """The peer is asked once; a longer prompt that begins alike is asked for by what is new."""

    async def run() -> None:
        await met(prefill, decode)
        first, longer = PROMPTS[3], PROMPTS[3] + PROMPTS[0][:40]
        for prompt, num in ((first, 1), (first, 1), (first + [3] * 20, 1), (longer, 2)):
            await final(decode, prompt, GREEDY)
            assert len(asked) == num
        assert await decode.reset_prefix_cache(reset_connector=True)
        await final(decode, first, GREEDY)
        assert len(asked) == 3

    asked = note_asked(monkeypatch)
    with pair(MODELS[0]) as (prefill, decode):
        asyncio.run(asyncio.wait_for(run(), 30))


def test_a_request_that_ends_is_not_computed_elsewhere_any_more():
    """The peer is busy; the prompts that wait there leave its queue with their requests."""

    async def run() -> None:
        await met(prefill, decode)
        busy = prefill.submit([5], replace(LONG, logits_processors=["paces"]))
        await anext(busy)
        streams = [decode.submit(prompt, LONGER, f"r{len(prompt)}") for prompt in PROMPTS[:2]]
        while prefill.num_unfinished < 3:
            await asyncio.sleep(0.005)
        await streams[0].aclose()
        await decode.abort(streams[1].request_id)
        assert (await streams[1].final()).outputs[0].finish_reason == "abort"
        while prefill.num_unfinished > 1:
            await asyncio.sleep(0.005)
        await busy.aclose()
        assert fingerprint(await final(decode, PROMPTS[0], GREEDY)) == answer

    (answer,) = expected(MODELS[0], PROMPTS[:1], GREEDY)
    paced = {"logits_processors": ("tests.support.processors:paces",)}
    with pair(MODELS[0], max_num_seqs=1, **paced) as (prefill, decode):
        asyncio.run(asyncio.wait_for(run(), 60))


def test_a_peer_keeps_no_more_than_it_may():
    """It has room for four blocks of twenty-seven, which go on as they come."""
    answers = expected(MODELS[0])
    block = 2 * 2 * 2 * 16 * 16 * 2

    async def run() -> None:
        await met(prefill, decode)
        outputs = await asyncio.gather(*map(final, [decode] * 4, PROMPTS, PARAMS))
        assert [fingerprint(output) for output in outputs] == answers

    with pair(MODELS[0], kv_transfer_size=4 * block) as (prefill, decode):
        asyncio.run(asyncio.wait_for(run(), 20))
        assert decode.stats().connector.num_fetched > 0
        assert prefill.stats().connector.stored.num_bytes <= 4 * block


def test_a_peer_with_another_precision_is_not_asked(caplog):
    async def run() -> None:
        prefill.start()
        decode.start()
        while "its KV blocks differ" not in caplog.text:
            await asyncio.sleep(0.01)
        output = await final(decode, PROMPTS[0], GREEDY)
        assert fingerprint(output) == answers[0]

    answers = expected(MODELS[0])
    address = free_address()
    backend, family, precision = MODELS[0]
    common = small_options(family) | {"backend": backend, "kv_transfer": "zmq"}
    with ExitStack() as stack:
        prefill = make_async(role="prefill", kv_transfer_address=address, **common, dtype="float32")
        stack.callback(prefill.close)
        decode = make_async(role="decode", prefill_peer=[address], **common, **precision)
        stack.callback(decode.close)
        asyncio.run(asyncio.wait_for(run(), 20))
        assert decode.prefill_peers == []
        assert "options: " in caplog.text
        assert prefill.stats().num_added == 0


def test_a_peer_with_another_transport_is_not_asked(caplog):
    """Engines compare how blocks go from one to the other when they meet."""
    mooncake()

    async def run() -> None:
        prefill.start()
        decode.start()
        while "its KV blocks differ" not in caplog.text:
            await asyncio.sleep(0.01)

    address = free_address()
    common = small_options() | {"backend": "native"}
    with ExitStack() as stack:
        prefill = make_async(
            role="prefill", kv_transfer_address=address, kv_transfer="zmq", **common
        )
        stack.callback(prefill.close)
        decode = make_async(role="decode", prefill_peer=[address], kv_transfer="mooncake", **common)
        stack.callback(decode.close)
        asyncio.run(asyncio.wait_for(run(), 20))
        assert decode.prefill_peers == [] and "transport: " in caplog.text


@pytest.mark.parametrize(
    ("transport", "module", "package"),
    [
        ("mooncake", "mooncake.engine", "mooncake-transfer-engine-non-cuda"),
        ("nixl", "nixl._api", "'octavo[nixl]'"),
    ],
)
def test_a_package_that_is_missing_is_named_before_anything_loads(
    monkeypatch, transport, module, package
):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, transport, None)
    with pytest.raises(BackendUnavailable, match=f"{transport} cannot be imported") as refused:
        make_async(role="prefill", kv_transfer=transport, **small_options())
    assert f"pip install {package}" in str(refused.value.hint)


def test_a_peer_that_ends_leaves_its_prompts_to_be_computed_here():
    """Requests are under way when the peer closes; later ones are not sent to it."""
    answers = expected(MODELS[0], params=LONGER)

    async def run() -> None:
        await met(prefill, decode)
        tasks = [asyncio.create_task(final(decode, prompt, LONGER)) for prompt in PROMPTS]
        await asyncio.sleep(0)
        await asyncio.to_thread(prefill.close)
        assert [fingerprint(await task) for task in tasks] == answers
        while decode.prefill_peers:
            await asyncio.sleep(0.01)
        assert fingerprint(await final(decode, PROMPTS[3], LONGER)) == answers[3]

    with pair(MODELS[0]) as (prefill, decode):
        asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peers_core_that_dies_or_stands_still_delays_and_changes_nothing(sign):
    """Its frontend still takes prompts, and its blocks do not come."""

    async def run() -> None:
        await met(prefill, decode)
        os.kill(pid, sign)
        outputs = await asyncio.gather(*map(final, [decode] * 4, PROMPTS, PARAMS))
        assert [fingerprint(output) for output in outputs] == answers

    answers = expected(MODELS[0])
    backend, family, precision = MODELS[0]
    address = free_address()
    common = small_options(family) | {"backend": backend, "kv_transfer": "zmq"} | precision
    options = common | {"role": "prefill", "kv_transfer_address": address}
    with ExitStack() as stack:
        frontend = build_with_process(EngineConfig.from_options(**options), quiet)
        prefill, pid = AsyncLLM(frontend), frontend.client.pid
        stack.callback(prefill.close)
        decode = make_async(
            role="decode", prefill_peer=[address], kv_transfer_min_tokens=32, **common
        )
        stack.callback(decode.close)
        asyncio.run(asyncio.wait_for(run(), 20))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_aborted_requests_wait_for_nothing():
    async def run() -> None:
        await met(prefill, decode)
        for _ in range(5):
            tasks = [asyncio.create_task(final(decode, prompt, LONGER)) for prompt in PROMPTS]
            await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        outputs = await asyncio.gather(*map(final, [decode] * 4, PROMPTS, PARAMS))
        assert [fingerprint(output) for output in outputs] == answers
        for engine in (prefill, decode):
            await num_requests(engine)
            assert engine.stats().num_used_blocks == 0

    answers = expected(MODELS[0])
    with pair(MODELS[0]) as (prefill, decode):
        asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("secret", ["the same", "another"])
def test_a_secret_must_be_known(secret):
    """A peer with another secret is never met, and prompts are computed where they came."""

    async def run() -> None:
        prefill.start()
        decode.start()
        if secret == "the same":
            await met(prefill, decode)
        else:
            await asyncio.sleep(0.3)
        assert bool(decode.prefill_peers) == (secret == "the same")
        assert fingerprint(await final(decode, PROMPTS[0], GREEDY)) == answers[0]

    answers = expected(MODELS[0])
    address = free_address()
    backend, family, precision = MODELS[0]
    common = small_options(family) | {"backend": backend, "kv_transfer": "zmq", **precision}
    with ExitStack() as stack:
        prefill = make_async(
            role="prefill",
            kv_transfer_address=address,
            kv_transfer_secret="the same",
            **common,
        )
        stack.callback(prefill.close)
        decode = make_async(
            role="decode",
            prefill_peer=[address],
            kv_transfer_secret=secret,
            kv_transfer_min_tokens=1,
            **common,
        )
        stack.callback(decode.close)
        asyncio.run(asyncio.wait_for(run(), 20))
        assert decode.stats().connector.num_fetched == (7 if secret == "the same" else 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "decode"}, "role: requires kv_transfer"),
        ({"kv_transfer": "zmq", "role": "decode"}, "without a prefill_peer"),
        (
            {"kv_transfer": "zmq", "role": "prefill", "prefill_peer": ["127.0.0.1:9"]},
            "expected decode or both",
        ),
        (
            {"kv_transfer": "zmq", "role": "decode", "prefill_peer": ["nowhere"]},
            "prefill_peer: got 'nowhere', expected HOST:PORT",
        ),
        (
            {"kv_transfer": "zmq", "prefill_peer": ["localhost:8998"]},
            "prefill_peer: got 'localhost:8998', which is this engine's own kv_transfer_address",
        ),
        (
            {"kv_transfer": "zmq", "role": "decode", "prefill_peer": 2 * ["10.0.0.1:8998"]},
            "prefill_peer: got '10.0.0.1:8998' twice",
        ),
        (
            {"kv_transfer": "zmq", "kv_transfer_address": "0.0.0.0:8998"},
            "without kv_transfer_secret",
        ),
        (
            {"kv_transfer": "zmq", "enable_prefix_caching": False},
            "requires kv_cache and enable_prefix_caching",
        ),
        ({"kv_transfer": "zmq", "kv_transfer_size": 10}, "kv_transfer_size: got 10"),
        ({"kv_transfer": "carrier"}, "kv_transfer: got 'carrier', expected"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_llm(backend="native", **options)


def test_a_peer_that_is_not_there_is_named_with_how_long_was_tried(caplog, monkeypatch):
    """The engine serves all the same, and goes on trying."""
    monkeypatch.setattr(prefill_peers, "REACH_S", 0.2)

    async def run() -> None:
        decode.start()
        while "could not be reached" not in caplog.text:
            await asyncio.sleep(0.01)

    address = free_address()
    with contextlib.closing(
        make_async(role="decode", kv_transfer="zmq", prefill_peer=[address])
    ) as decode:
        asyncio.run(asyncio.wait_for(run(), 20))
    assert f"prefill_peer: {address} could not be reached for 0.2 s" in caplog.text


def test_a_port_that_is_taken_is_named():
    address = free_address()
    host, port = address.split(":")
    with socket.socket() as taken:
        taken.bind((host, int(port) + 1))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            make_llm(backend="native", kv_transfer="zmq", kv_transfer_address=address)
