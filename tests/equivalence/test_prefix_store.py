"""The prefix cache off the device, in host memory and on disk: what is found there is bitwise what
is computed, whatever happens to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.api.errors import ConfigError, InvalidRequest
from octavo.engine.protocol.kv_messages import ConnectorStats
from octavo.worker.kv_connectors.block_directory import BlockDirectory
from tests.support.llm_tools import (
    GREEDY,
    PENALISED,
    SAMPLED,
    fingerprint,
    make_llm,
    prompts_of,
    small_options,
)

pytestmark = pytest.mark.sampled(one_in=2)

SETUPS = [
    *(("reference", family, {}) for family in ("llama", "gemma3_text")),
    *(
        ("native", family, {"dtype": dtype})
        for family in ("llama", "gemma3_text", "gpt2")
        for dtype in ("float32", "bfloat16")
    ),
    ("native", "qwen3", {"quantization": "int8"}),
    ("native", "qwen3", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    ("native", "gemma3_text", {"kv_cache_dtype": "int4"}),
    ("torch", "gemma3_text", {"dtype": "bfloat16"}),
    ("torch", "deepseek_v3", {"quantization": "int8", "kv_cache_dtype": "int8"}),
]

PROMPTS = prompts_of(120, 130, 17, 200)
PARAMS = [GREEDY, SAMPLED, PENALISED, SAMPLED]


@pytest.fixture(
    params=SETUPS, ids=lambda setup: f"{setup[0]}-{setup[1]}-{'-'.join(setup[2].values())}"
)
def setup(request):
    return request.param


def make(setup: Any = SETUPS[2], **options: Any) -> LLM:
    backend, family, precision = setup
    return make_llm(family, backend=backend, **precision, **options)


def answers(llm: LLM, prompts: Any = PROMPTS, params: Any = PARAMS) -> tuple[list[Any], list[int]]:
    outputs = llm.generate(prompts, params)
    return [fingerprint(output) for output in outputs], [
        output.num_cached_tokens for output in outputs
    ]


def plain(setup: Any = SETUPS[2], prompts: Any = PROMPTS, params: Any = PARAMS) -> list[Any]:
    with make(setup, enable_prefix_caching=False) as llm:
        return answers(llm, prompts, params)[0]


def stats_of(llm: LLM) -> ConnectorStats:
    return llm.get_metrics().connector


def files_of(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))


def test_found_on_disk_is_as_good_as_computed(setup, tmp_path):
    expected = plain(setup)
    for hits in ([0] * 4, [112, 128, 16, 192]):
        with make(setup, prefix_cache_dir=str(tmp_path)) as llm:
            assert answers(llm) == (expected, hits)
            assert stats_of(llm).num_loaded == stats_of(llm).num_fetched
            assert (stats_of(llm).num_loaded > 0) == (hits[0] > 0)


def test_found_in_host_memory_is_as_good_as_computed(setup):
    """A device so small that the second prompt takes the first one's blocks."""
    prompts = prompts_of(230, 231, 233)
    expected = plain(setup, prompts, SAMPLED)
    options = {
        "kv_cache_memory_bytes": kv_bytes(setup, 16),
        "kv_offloading_size": "16MiB",
        "max_num_seqs": 1,
        "swap_space": 0,
    }
    with make(setup, **options) as llm:
        for _ in range(3):
            for prompt, one in zip(prompts, expected, strict=True):
                assert answers(llm, [prompt], SAMPLED)[0] == [one]
        stats = llm.get_metrics()
    assert stats.connector.num_loaded > 20 and stats.prefix_hit_tokens > 6 * 200


def kv_bytes(setup: Any, num_blocks: int) -> int:
    """Returns the KV memory of `num_blocks` blocks in every group: where as many requests may run,
    no window bounds them.
    """
    with make(setup, kv_cache_memory_bytes=1 << 26, max_num_seqs=4096) as llm:
        return (1 << 26) // (llm.info.kv_capacity_tokens // 16) * num_blocks


def test_a_stored_prefix_is_shared_by_forks_and_longer_prompts(setup, tmp_path):
    prefix, *tails = prompts_of(100, 1, 30, 70)
    prompts = [prefix + tail for tail in tails]
    forked = SamplingParams(n=3, temperature=1, seed=4, max_tokens=9, ignore_eos=True)
    expected = plain(setup, prompts, forked)
    with make(setup, prefix_cache_dir=str(tmp_path)) as llm:
        llm.generate(prefix, GREEDY)
    with make(setup, prefix_cache_dir=str(tmp_path)) as llm:
        found, hits = answers(llm, prompts, forked)
        assert found == expected and hits == [96] * 3
        assert stats_of(llm).num_fetched == stats_of(llm).num_loaded, "read once for all"


# -- what may go wrong with files ------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "tampered":
        raw[len(raw) // 2] ^= 1
    else:
        del raw[len(raw) // 3 :]
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["tampered", "truncated", "gone"])
@pytest.mark.parametrize("which", [0, 3, 6])
def test_a_damaged_file_is_reported_computed_again_and_replaced(tmp_path, caplog, how, which):
    prompt = PROMPTS[0]
    expected = plain(prompts=prompt, params=GREEDY)
    with make(prefix_cache_dir=str(tmp_path)) as llm:
        llm.generate(prompt, GREEDY)
    files = files_of(tmp_path)
    before = {path: path.read_bytes() for path in files}
    victim = next(path for path in files if token_of(path) == prompt[16 * which])
    damage(victim, how) if how != "gone" else None
    with make(prefix_cache_dir=str(tmp_path)) as llm:
        if how == "gone":
            victim.unlink()
        assert answers(llm, prompt, GREEDY) == (expected, [16 * which])
        assert stats_of(llm).num_not_fetched == 1
        llm.generate(PROMPTS[2], GREEDY)
        assert stats_of(llm).stored.num_damaged == (how != "gone")
    assert (str(victim) in caplog.text) == (how != "gone")
    assert all(path.read_bytes() == content for path, content in before.items()), (
        "it was written again, with the same bytes"
    )
    with make(prefix_cache_dir=str(tmp_path)) as llm:
        assert answers(llm, prompt, GREEDY) == (expected, [112])


def token_of(path: Path) -> int:
    """Returns the first token id of a block's file."""
    return int.from_bytes(path.read_bytes()[96:100], "little")


WRITER = """
import json, sys
from octavo import LLM, SamplingParams
given = json.load(sys.stdin)
with LLM(**given["options"], report=lambda text: None) as llm:
    print("ready", flush=True)
    llm.generate(given["prompts"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
"""
"""Code of a process without the tests' imports, which take seconds."""


def test_killed_while_it_writes(tmp_path):
    """Every block that had been written is sound, and none that was half written is found."""
    prompts = prompts_of(*range(60, 240, 9))
    expected = plain(prompts=prompts, params=GREEDY)
    options = small_options() | {
        "backend": "native",
        "dtype": "float32",
        "max_num_batched_tokens": 64,
        "prefix_cache_dir": str(tmp_path),
    }
    given = json.dumps({"options": options, "prompts": prompts_of(*range(60, 240))}).encode()
    counts = []
    for delay in (0.0, 0.02, 0.05, 0.1, 0.2):
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER], env=os.environ | {"PYTHONPATH": os.getcwd()}, **pipes
        )
        writer.stdin.write(given)
        writer.stdin.close()
        assert writer.stdout.readline() == b"ready\n"
        num_files = len(files_of(tmp_path))
        while len(files_of(tmp_path)) == num_files and writer.poll() is None:
            time.sleep(0.001)
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        counts.append(len(files_of(tmp_path)))
        with make(prefix_cache_dir=str(tmp_path)) as llm:
            assert answers(llm, prompts, GREEDY)[0] == expected
            assert stats_of(llm).stored.num_damaged == 0
    assert counts[-1] > 100


def test_two_engines_at_once_on_one_directory(tmp_path):
    """Each engine finds what the other has written and not removed; the cache is so small that they
    remove each other's blocks all the time.
    """
    prompts = prompts_of(*range(60, 240, 9))
    expected = plain(prompts=prompts, params=GREEDY)
    results: dict[int, Any] = {}

    def work(index: int) -> None:
        order = list(range(len(prompts)))[:: 1 - 2 * index]
        with make(
            prefix_cache_dir=str(tmp_path), prefix_cache_size="600KiB", max_num_seqs=2
        ) as llm:
            for _ in range(3):
                found = answers(llm, [prompts[i] for i in order], GREEDY)[0]
                results[index] = [found[order.index(i)] for i in range(len(order))]
                assert llm.reset_prefix_cache()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: expected, 1: expected}
    with make(prefix_cache_dir=str(tmp_path), prefix_cache_size="600KiB") as llm:
        assert answers(llm, prompts, GREEDY)[0] == expected
        assert stats_of(llm).stored.num_damaged == 0
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 600 << 10


def test_a_full_disk_costs_nothing_but_the_cache(small_disk, caplog):
    expected = plain()
    for _ in range(2):
        with make(prefix_cache_dir=str(small_disk)) as llm:
            assert answers(llm)[0] == expected
            assert answers(llm)[0] == expected
    assert "pausing prefix cache writes for" in caplog.text and "No space left" in caplog.text
    assert len(files_of(small_disk)) > 2 and not list((small_disk / "tmp").iterdir())


def test_a_disk_that_is_full_from_the_start(small_disk, caplog):
    """The file with the weights' hashes cannot be written either."""
    (small_disk / "other").write_bytes(bytes(60 << 10))
    with contextlib.suppress(OSError), (small_disk / "more").open("wb", buffering=0) as file:
        while file.write(bytes(512)):
            pass
    with make(prefix_cache_dir=str(small_disk)) as llm:
        assert answers(llm)[0] == plain()
    assert (
        "weights.json cannot be written" in caplog.text
        and "pausing prefix cache writes for" in caplog.text
    )
    assert sorted(path.name for path in small_disk.iterdir() if path.is_file()) == ["more", "other"]


def test_a_slow_disk_holds_up_only_who_waits_for_it(tmp_path, monkeypatch):
    with make(prefix_cache_dir=str(tmp_path)) as llm:
        expected = answers(llm, PROMPTS[0], GREEDY)[0]
    slow = threading.Event()
    read = BlockDirectory.read

    def wait_and_read(*given: Any) -> bool:
        assert slow.wait(20)
        return read(*given)

    monkeypatch.setattr(BlockDirectory, "read", wait_and_read)
    asyncio.run(_overtake(tmp_path, slow, expected))


async def _overtake(tmp_path: Path, slow: threading.Event, expected: list[Any]) -> None:
    options = small_options() | {
        "backend": "native",
        "dtype": "float32",
        "prefix_cache_dir": str(tmp_path),
    }
    llm = AsyncLLM.from_options(in_process=True, **options)
    try:
        stored = llm.submit({"prompt_token_ids": PROMPTS[0]}, GREEDY)
        for prompt in PROMPTS[1:]:
            await llm.submit({"prompt_token_ids": prompt}, GREEDY).final()
        assert llm.stats().num_waiting == 1
        slow.set()
        output = await stored.final()
        assert output.num_cached_tokens == 112 and [fingerprint(output)] == expected
    finally:
        slow.set()
        llm.close()


@pytest.mark.parametrize("slots", ["16MiB", "64KiB"])
def test_a_disk_that_writes_slowly_holds_up_no_request(tmp_path, monkeypatch, slots):
    """The cache has slots for all blocks, or five, which blocks not yet written soon hold."""
    expected = plain()
    slow = threading.Event()
    write = BlockDirectory.write

    def wait_and_write(*given: Any) -> list[Any]:
        assert slow.wait(20)
        return write(*given)

    monkeypatch.setattr(BlockDirectory, "write", wait_and_write)
    with make(prefix_cache_dir=str(tmp_path), kv_offloading_size=slots) as llm:
        for _ in range(2):
            assert answers(llm)[0] == expected
            assert llm.reset_prefix_cache()
        num_saved = stats_of(llm).num_saved
        assert stats_of(llm).num_kept == 0 and files_of(tmp_path) == [] and num_saved >= 5
        slow.set()
    assert len(files_of(tmp_path)) >= num_saved, "what is left is written at the end"


def test_a_disk_that_hangs_is_given_up(tmp_path, monkeypatch):
    with make(prefix_cache_dir=str(tmp_path)) as llm:
        expected = answers(llm, PROMPTS[0], GREEDY)[0]
    monkeypatch.setattr("octavo.worker.kv_connectors.tiers.OVERDUE_S", 0.2)
    hangs = threading.Event()
    monkeypatch.setattr(BlockDirectory, "read", lambda *_: not hangs.wait(20))
    with make(prefix_cache_dir=str(tmp_path)) as llm:
        assert answers(llm, PROMPTS[0], GREEDY) == (expected, [0])
        hangs.set()


# -- options ---------------------------------------------------------------------------------------


def test_other_options_find_nothing(tmp_path):
    first, *others = [
        SETUPS[2],
        SETUPS[3],
        SETUPS[0],
        (*SETUPS[2][:2], {"dtype": "float32", "kv_cache_dtype": "bf16"}),
        SETUPS[-1],
    ]
    with make(first, prefix_cache_dir=str(tmp_path)) as llm:
        llm.generate(PROMPTS[0], GREEDY)
    for other in others:
        with make(other, prefix_cache_dir=str(tmp_path)) as llm:
            assert answers(llm, PROMPTS[0], GREEDY)[1] == [0], other


def test_another_salt_finds_nothing(tmp_path):
    for salt, hit in (("one", 0), ("two", 0), ("one", 112)):
        with make(prefix_cache_dir=str(tmp_path)) as llm:
            assert answers(llm, {"prompt_token_ids": PROMPTS[0], "cache_salt": salt}, GREEDY)[
                1
            ] == [hit]


def test_resetting_the_device_leaves_the_disk_and_resetting_all_does_not(tmp_path):
    with make(prefix_cache_dir=str(tmp_path)) as llm:
        llm.generate(PROMPTS[0], GREEDY)
        assert llm.reset_prefix_cache()
        assert answers(llm, PROMPTS[0], GREEDY)[1] == [112]
        assert llm.reset_prefix_cache(reset_connector=True)
        assert answers(llm, PROMPTS[0], GREEDY)[1] == [0]
        assert llm.reset_prefix_cache(reset_connector=True)
    assert files_of(tmp_path) == []


# -- pins ------------------------------------------------------------------------------------------


SMALL = "120KiB"
"""Size of a cache of nine blocks; four of them may be pinned."""


def test_a_pinned_prompt_outlives_what_comes_after_it_and_the_engine(tmp_path):
    system = prompts_of(70)[0]
    crowd = prompts_of(*range(80, 200, 10))
    for pins in (False, True):
        folder = str(tmp_path / str(pins))
        with make(prefix_cache_dir=folder, prefix_cache_size=SMALL) as llm:
            llm.generate(system, GREEDY)
            if pins:
                assert llm.pin_prefix(system, ttl_s=3600) == 64
            for prompt in crowd:
                llm.generate(prompt, GREEDY)
            assert stats_of(llm).stored.num_bytes <= 120 << 10
        with make(prefix_cache_dir=folder, prefix_cache_size=SMALL) as llm:
            assert (answers(llm, system, GREEDY)[1] == [64]) == pins
            (file_bytes,) = {path.stat().st_size for path in files_of(Path(folder))}
            assert stats_of(llm).stored.pinned_bytes == 4 * file_bytes * pins


@pytest.mark.parametrize("ttls", [(None, 0), (0.01,)])
def test_a_pin_ends_with_its_time_or_by_a_word(tmp_path, ttls):
    system = prompts_of(70)[0]
    with make(prefix_cache_dir=str(tmp_path), prefix_cache_size=SMALL) as llm:
        for ttl_s in ttls:
            assert llm.pin_prefix(system, ttl_s=ttl_s) == 64
        for prompt in prompts_of(*range(80, 200, 10)):
            llm.generate(prompt, GREEDY)
    with make(prefix_cache_dir=str(tmp_path), prefix_cache_size=SMALL) as llm:
        assert answers(llm, system, GREEDY)[1] == [0]


def test_pins_are_of_one_salt_and_bounded(tmp_path):
    with make(prefix_cache_dir=str(tmp_path), prefix_cache_size=SMALL) as llm:
        assert (
            llm.pin_prefix({"prompt_token_ids": prompts_of(33)[0], "cache_salt": "mine"}, ttl_s=60)
            == 32
        )
        assert llm.pin_prefix([5] * 15) == 0, "nothing in whole blocks"
        assert [llm.pin_prefix([5] * 32, ttl_s=ttl_s) for ttl_s in (60, 120, None)] == [32] * 3, (
            "it counts once"
        )
        assert llm.pin_prefix([6] * 1) == 0
        with pytest.raises(
            InvalidRequest,
            match="blocks have 24,576 bytes, and 49,152 are pinned; expected at most 61,440",
        ):
            llm.pin_prefix([6] * 32)
        assert llm.pin_prefix([5] * 32, ttl_s=0) == 32, "there is always room for less"
        assert llm.pin_prefix([6] * 32) == 32
    with make(prefix_cache_dir=str(tmp_path), prefix_cache_size=SMALL) as llm:
        assert llm.pin_prefix([6] * 32) == 32, "it knows what was pinned before it"
        with pytest.raises(
            InvalidRequest,
            match=r"blocks have [\d,]+ bytes, and [\d,]+ are pinned; expected at most 61,440",
        ):
            llm.pin_prefix(prompts_of(200)[0])
        with pytest.raises(InvalidRequest, match="ttl_s: got -1"):
            llm.pin_prefix([5] * 20, ttl_s=-1)
    with (
        make() as llm,
        pytest.raises(InvalidRequest, match="pinning requires prefix_cache_dir"),
    ):
        llm.pin_prefix([5] * 20)


BAD_OPTIONS = {
    "caching": (
        {"enable_prefix_caching": False},
        "prefix_cache_dir: requires kv_cache and enable_prefix_caching",
    ),
    "size": (
        {"prefix_cache_size": 100},
        "prefix_cache_size: got 100, expected at least one block of each cache group",
    ),
    "slots": (
        {"kv_offloading_size": 100},
        "kv_offloading_size: got 100 B, expected at least one block",
    ),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_that_cannot_be_are_named(tmp_path, name):
    options, message = BAD_OPTIONS[name]
    with pytest.raises(ConfigError, match=message):
        make(prefix_cache_dir=str(tmp_path), **options)
