"""Ranks that were started by themselves, as on other machines: the engine's answers are those of
ranks that it starts, and a rank that is lost ends it by name.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from octavo import LLM
from octavo.api.errors import EngineDead
from tests.support.free_ports import free_port
from tests.support.llm_tools import GREEDY, SAMPLED, fingerprint, prompts_of, small_options

OPTIONS = small_options() | {
    "backend": "torch",
    "device": "cpu",
    "tensor_parallel_size": 2,
    "batch_invariant": False,
}
PROMPTS = prompts_of(40, 9)
PARAMS = [GREEDY, SAMPLED]


@contextmanager
def rank_at(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `octavo rank`, which waits for the first rank."""
    command = [sys.executable, "-m", "octavo.cli.main", "rank", address, "--rank", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_ranks_of_their_own_give_the_same_answers_and_end_with_the_engine() -> None:
    address = f"127.0.0.1:{free_port()}"
    with LLM(**OPTIONS, report=lambda text: None) as llm:
        wanted = [fingerprint(output) for output in llm.generate(PROMPTS, PARAMS)]
    with rank_at(address) as rank:
        with LLM(**OPTIONS, rank_address=address, report=lambda text: None) as llm:
            found = [fingerprint(output) for output in llm.generate(PROMPTS, PARAMS)]
        assert found == wanted
        assert rank.wait(20) == 0


@pytest.mark.slow
def test_a_rank_of_its_own_that_is_lost_ends_the_engine_by_name() -> None:
    address = f"127.0.0.1:{free_port()}"
    with (
        rank_at(address) as rank,
        LLM(**OPTIONS, rank_address=address, report=lambda text: None) as llm,
    ):
        llm.generate(PROMPTS[:1], GREEDY)
        rank.send_signal(signal.SIGKILL)
        with pytest.raises(EngineDead, match="rank 1 of 2 has ended"):
            for _ in range(100):
                llm.generate(PROMPTS[:1], GREEDY)


@pytest.mark.slow
def test_an_engine_that_is_lost_ends_its_ranks_on_other_machines() -> None:
    address = f"127.0.0.1:{free_port()}"
    code = (
        "from octavo import LLM; import sys;"
        f"llm = LLM(**{OPTIONS!r}, rank_address={address!r}, report=lambda text: None);"
        "print('there', flush=True); sys.stdin.read()"
    )
    with rank_at(address) as rank:
        engine = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert engine.stdout is not None and b"there" in engine.stdout.readline()
            engine.kill()
            assert rank.wait(20) == 1
            assert rank.stderr is not None and b"has exited" in rank.stderr.read()
        finally:
            engine.kill()
            engine.wait()
