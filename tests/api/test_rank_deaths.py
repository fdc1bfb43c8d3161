"""A rank that dies ends its engine with its name and how it died, and an engine that ends, however
it does, leaves no rank behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.api.errors import EngineDead, OctavoError
from octavo.config.engine_config import EngineConfig
from octavo.engine.clients.supervised import SupervisedClient
from octavo.utils.progress import quiet
from octavo.wiring.engine import build_core, build_with_process, core_texts
from octavo.wiring.model import open_model
from octavo.worker.ranks.ranked_worker import RankedWorker
from tests.support.llm_tools import prompts_of, small_options
from tests.support.rank_processes import ranks_below
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.sampled(one_in=2)

torch.set_num_threads(1)

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SOON_S = 10.0
OPTIONS = small_options() | {
    "backend": "torch",
    "device": "cpu",
    "tensor_parallel_size": 2,
    "batch_invariant": False,
}
NATIVE = OPTIONS | {"backend": "native", "device": None}


def is_there(pid: int) -> bool:
    """Returns whether a process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true: Callable[[], bool], timeout_s: float = SOON_S) -> None:
    for _ in range(int(timeout_s / 0.02)):
        if true():
            return
        time.sleep(0.02)
    assert true(), "it did not become true in time"


@pytest.mark.parametrize("options", [OPTIONS, NATIVE], ids=["torch", "native"])
def test_an_llm_that_loses_a_rank_raises_its_name(options: dict[str, object]) -> None:
    with LLM(**options, report=lambda text: None) as llm:
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


STAGES = NATIVE | {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


@pytest.mark.parametrize("which", range(3))
def test_a_rank_that_dies_in_any_stage_ends_the_engine_at_once(which: int) -> None:
    """Its neighbour in the first stage waits for it in a collective that the process of the last
    stage takes no part in, and that process waits for the neighbour.
    """
    with LLM(**STAGES, report=lambda text: None) as llm:
        ranks = sorted(ranks_below(os.getpid()))
        stream = llm.stream(prompts_of(20)[0], LONG)
        next(stream)
        os.kill(ranks[which], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineDead, match=r"rank \d of 4 has ended \(killed by signal 9\)"):
            for _ in stream:
                pass
        assert time.monotonic() - began < SOON_S
        wait_until(lambda: not any(map(is_there, ranks)))


class Engine:
    """An AsyncLLM with its core in another process and two ranks; notes what it reports."""

    def __init__(self, **options: object) -> None:
        self.said: list[str] = []
        config = EngineConfig.from_options(**OPTIONS | options)
        self._front = build_with_process(config, self.said.append)
        self.llm = AsyncLLM(self._front)
        self.said.clear()

    @property
    def core(self) -> int:
        """Process id of the core."""
        assert isinstance(self._front.client, SupervisedClient)
        return self._front.client.pid

    @property
    def rank(self) -> int:
        """Process id of the other rank."""
        (rank,) = ranks_below(self.core)
        return rank

    async def run_over(self, kill: Callable[[], None]) -> list[int]:
        """Runs three requests and kills something while they run; returns their token counts."""
        streams = [self.llm.submit(prompt, LONG) for prompt in prompts_of(5, 20, 33)]
        for stream in streams:
            await anext(stream)
        kill()
        outputs = [await stream.final() for stream in streams]
        return [len(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.llm.close()


LOST = "rank 1 of 2 has ended (killed by signal 9): restarting the engine"


@pytest.mark.slow
def test_an_engine_that_loses_a_rank_is_replaced_with_all_its_ranks(engine: Engine) -> None:
    core, rank = engine.core, engine.rank
    assert asyncio.run(engine.run_over(lambda: os.kill(rank, signal.SIGKILL))) == [200] * 3
    assert engine.said[0].endswith(LOST)
    wait_until(lambda: not is_there(core) and not is_there(rank))
    assert is_there(engine.rank) and engine.core != core


def test_the_loss_of_a_rank_is_noticed_by_an_idle_engine(engine: Engine) -> None:
    core, rank = engine.core, engine.rank

    async def watch() -> None:
        engine.llm.start()
        os.kill(rank, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: engine.said[:1] == [LOST])

    asyncio.run(watch())
    wait_until(lambda: not is_there(core))


@pytest.mark.parametrize(
    "stopped",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["rank runs", "rank is stopped"],
)
def test_a_core_that_is_killed_takes_its_ranks_along(engine: Engine, stopped: bool) -> None:
    core, rank = engine.core, engine.rank
    if stopped:
        os.kill(rank, signal.SIGSTOP)

    async def watch() -> None:
        engine.llm.start()
        os.kill(core, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: bool(engine.said))

    asyncio.run(watch())
    assert engine.said[0].startswith("the engine process has exited (killed by signal 9)")
    wait_until(lambda: not is_there(rank))


@pytest.mark.slow
def test_native_ranks_are_replaced_with_their_engine() -> None:
    """The first rank waits in a collective that the killed one never comes to."""
    engine = Engine(backend="native", device=None)
    rank = engine.rank
    try:
        assert asyncio.run(engine.run_over(lambda: os.kill(rank, signal.SIGKILL))) == [200] * 3
        assert engine.said[0].endswith(LOST)
    finally:
        engine.llm.close()


@pytest.mark.slow
def test_a_rank_that_hangs_is_replaced_with_its_engine() -> None:
    """No step makes progress; the requests go on in the next engine, whose ranks are new."""
    engine = Engine(stall_timeout=3.0)
    core, rank = engine.core, engine.rank
    try:
        assert asyncio.run(engine.run_over(lambda: os.kill(rank, signal.SIGSTOP))) == [200] * 3
        assert not is_there(rank) and not is_there(core)
        after = engine.rank
        assert is_there(after)
    finally:
        engine.llm.close()
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
    """Ctrl-C reaches the whole process group, as a terminal sends it."""
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


def test_a_rank_that_dies_while_it_loads_is_named() -> None:
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
def test_ranks_that_are_closed_are_not_reported_as_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """Each of several ends when it is told to, before its neighbour has been waited for."""
    config = EngineConfig.from_options(**OPTIONS | {"tensor_parallel_size": 4})
    model = open_model(config)
    built = build_core(model, quiet, core_texts(model, lambda: None))
    ranks = ranks_below(os.getpid())
    assert len(ranks) == 3 and isinstance(built.worker, RankedWorker)
    losses: list[OctavoError] = []
    built.worker.when_lost(losses.append)
    built.core.close()
    assert losses == [] and not any(map(is_there, ranks))
    assert capfd.readouterr().err == ""


def test_close_leaves_no_rank() -> None:
    llm = LLM(**OPTIONS, report=lambda text: None)
    (rank,) = ranks_below(os.getpid())
    llm.close()
    assert not is_there(rank)


@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_llm_that_loses_a_stage_raises_its_name(num_stages: int) -> None:
    path = tiny_model("llama", num_hidden_layers=3).path
    options = small_options(model_path=path) | {
        "backend": "native",
        "batch_invariant": False,
        "pipeline_parallel_size": num_stages,
    }
    with LLM(**options, report=lambda text: None) as llm:
        stages = sorted(ranks_below(os.getpid()))
        assert len(stages) == num_stages - 1
        stream = llm.stream(prompts_of(20)[0], LONG)
        next(stream)
        os.kill(stages[0], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineDead, match=rf"(rank|stage) \d of {num_stages} has ended"):
            for _ in stream:
                pass
        assert time.monotonic() - began < SOON_S
        assert ranks_below(os.getpid()) == []
