"""A rank that dies ends the running requests with its name and how it died, and whatever ends an
engine leaves no rank behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.errors import EngineDead
from tests.support.llm_tools import prompts_of, small_options
from tests.support.tiny_models import tiny_model

torch.set_num_threads(1)

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SOON_S = 10.0
OPTIONS = small_options() | {
    "backend": "torch",
    "device": "cpu",
    "tensor_parallel_size": 2,
    "batch_invariant": False,
}


def ranks_below(pid: int) -> list[int]:
    """The processes of other ranks that this one has started."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == pid
                and b"octavo.worker.ranks.process" in (folder / "cmdline").read_bytes()
            ):
                found.append(int(folder.name))
    return found


def is_there(pid: int) -> bool:
    """And no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true: Callable[[], bool], timeout_s: float = SOON_S) -> None:
    for _ in range(int(timeout_s / 0.02)):
        if true():
            return
        time.sleep(0.02)
    assert true(), "not in time"


def test_in_one_process() -> None:
    with LLM(**OPTIONS, report=lambda text: None) as llm:
        (rank,) = ranks_below(os.getpid())
        stream = llm.stream(prompts_of(20)[0], LONG)
        next(stream)
        os.kill(rank, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineDead, match=r"rank 1 of 2 has ended \(killed by signal 9\)"):
            for _ in stream:
                pass
        assert time.monotonic() - began < SOON_S
        with pytest.raises(EngineDead, match=r"killed by signal 9"):
            llm.generate([5, 6], LONG)
        assert ranks_below(os.getpid()) == []


def engine() -> tuple[AsyncLLM, int, int]:
    """Its core's process, and its other rank."""
    llm = AsyncLLM.from_options(**OPTIONS, report=lambda text: None)
    core = llm._front.client.pid  # type: ignore[attr-defined]
    (rank,) = ranks_below(core)
    return llm, core, rank


async def until_dead(
    llm: AsyncLLM, kill: Callable[[], None]
) -> tuple[list[BaseException | None], float]:
    """How three requests end when something is killed while they run, and after how long."""
    streams = [llm.submit(prompt, LONG) for prompt in prompts_of(5, 20, 33)]
    for stream in streams:
        await anext(stream)
    kill()
    began = time.monotonic()
    ends = await asyncio.gather(*(stream.final() for stream in streams), return_exceptions=True)
    return [
        end if isinstance(end, BaseException) else None for end in ends
    ], time.monotonic() - began


def test_behind_a_front() -> None:
    llm, core, rank = engine()
    try:
        errors, took_s = asyncio.run(until_dead(llm, lambda: os.kill(rank, signal.SIGKILL)))
        assert took_s < SOON_S
        assert all(
            isinstance(error, EngineDead)
            and "rank 1 of 2 has ended (killed by signal 9)" in error.message
            for error in errors
        )
        with pytest.raises(EngineDead, match="killed by signal 9"):
            llm.check_health()
        wait_until(lambda: not is_there(core) and not is_there(rank))
    finally:
        llm.close()


def test_of_an_idle_engine() -> None:
    """Nobody has to ask for anything first."""
    llm, core, rank = engine()

    async def watch() -> str:
        llm.start()
        os.kill(rank, signal.SIGKILL)
        end = time.monotonic() + SOON_S
        while time.monotonic() < end:
            try:
                llm.check_health()
            except EngineDead as error:
                return error.message
            await asyncio.sleep(0.05)
        return "still well"

    try:
        assert "rank 1 of 2 has ended (killed by signal 9)" in asyncio.run(watch())
        wait_until(lambda: not is_there(core))
    finally:
        llm.close()


@pytest.mark.parametrize(
    "stopped",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["rank runs", "rank is stopped"],
)
def test_a_core_that_is_killed_takes_its_ranks_along(stopped: bool) -> None:
    llm, core, rank = engine()
    try:
        if stopped:
            os.kill(rank, signal.SIGSTOP)
        assert "the engine process has ended (killed by signal 9)" in asyncio.run(
            end_with(llm, core)
        )
        wait_until(lambda: not is_there(rank))
    finally:
        llm.close()


async def end_with(llm: AsyncLLM, core: int) -> str:
    """What a request is told whose engine is killed."""
    stream = llm.submit(prompts_of(5)[0], LONG)
    await asyncio.sleep(0.1)
    os.kill(core, signal.SIGKILL)
    try:
        await stream.final()
    except EngineDead as error:
        return error.message
    return "it went on"


@pytest.mark.slow
def test_a_rank_that_hangs_is_replaced_with_its_engine() -> None:
    """The front sees that no step gets ahead; the others' requests go on in the next engine, whose
    ranks are new.
    """
    llm = AsyncLLM.from_options(**OPTIONS | {"stall_timeout": 3.0}, report=lambda text: None)
    core = llm._front.client.pid  # type: ignore[attr-defined]
    (rank,) = ranks_below(core)

    async def run() -> list[object]:
        streams = [llm.submit(prompt, LONG) for prompt in prompts_of(5, 20)]
        for stream in streams:
            await anext(stream)
        os.kill(rank, signal.SIGSTOP)
        return [await stream.final() for stream in streams]

    try:
        outputs = asyncio.run(run())
        assert [len(output.outputs[0].token_ids) for output in outputs] == [200, 200]
        assert not is_there(rank) and not is_there(core)
        (after,) = ranks_below(llm._front.client.pid)  # type: ignore[attr-defined]
        assert is_there(after)
    finally:
        llm.close()
    wait_until(lambda: not is_there(after))


SCRIPT = """
import signal, sys
from octavo import LLM, SamplingParams
# A shell turns SIGINT off for what it runs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
llm = LLM(**eval(sys.argv[1]), report=lambda text: None)
print("ready", flush=True)
while True:
    llm.generate([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
"""


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGINT,
        *(pytest.param(how, marks=pytest.mark.slow) for how in (signal.SIGTERM, signal.SIGKILL)),
    ],
)
def test_a_program_that_ends_leaves_no_rank(how: signal.Signals) -> None:
    """Ctrl-C reaches the whole group, as a terminal sends it."""
    options = OPTIONS | {"model": str(tiny_model("llama").path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, repr(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        (rank,) = ranks_below(process.pid)
        (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
        process.wait(SOON_S)
    finally:
        process.stdout.close()
        process.kill()
        process.wait()
    wait_until(lambda: not is_there(rank))


def test_while_it_loads() -> None:
    def kill_the_first_seen() -> None:
        wait_until(lambda: bool(ranks_below(os.getpid())))
        os.kill(ranks_below(os.getpid())[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_the_first_seen)
    killer.start()
    with pytest.raises(EngineDead, match=r"rank 1 of 2 has ended \(killed by signal 9\)"):
        LLM(**OPTIONS, report=lambda text: None)
    killer.join()
    assert ranks_below(os.getpid()) == []


@pytest.mark.slow
def test_closing_many_is_no_loss(capfd: pytest.CaptureFixture[str]) -> None:
    """Each ends when it is told to, before its neighbour has been waited for."""
    with LLM(**OPTIONS | {"tensor_parallel_size": 4}, report=lambda text: None) as llm:
        ranks = ranks_below(os.getpid())
        assert len(ranks) == 3
        others = llm._front.client._core.executor._others  # type: ignore[attr-defined]
    assert others.lost is None and not any(map(is_there, ranks))
    assert capfd.readouterr().err == ""


def test_close_leaves_no_rank() -> None:
    llm = LLM(**OPTIONS, report=lambda text: None)
    (rank,) = ranks_below(os.getpid())
    llm.close()
    assert not is_there(rank)
