"""Keys and values in a file while memory lacks room: the bits of the same choice in memory,
at the least memory that works; what is refused before a weight is read; and what happens where the
file cannot be read.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError
from octavo.config.engine_config import EngineConfig
from octavo.executor.native.weight_file import get_file_system
from octavo.wiring.plan import plan_model
from tests.support.llm_tools import (
    GREEDY,
    PENALISED,
    SAMPLED,
    core_of,
    fingerprint,
    make_llm,
    prompts_of,
)
from tests.support.native_harness import require_native
from tests.support.sparse_rows import alone_and_together
from tests.support.tiny_models import tiny_model

PROMPTS = prompts_of(5, 190, 133, 70)
PARAMS = [
    msgspec.structs.replace(GREEDY, max_tokens=20),
    SAMPLED,
    PENALISED,
    msgspec.structs.replace(SAMPLED, n=2),
]
LAYERS = 5
CHOOSING = 3
"""Layers that choose keys: all but the first two."""
FILE_BYTES = CHOOSING * 64 * 4096
"""Room for 64 blocks, each on a page."""


@pytest.fixture(scope="module", autouse=True)
def native():
    require_native()


def engine(directory: Path | None, memory: int = 64 << 20, **options: Any) -> LLM:
    """Makes an engine that chooses keys; without a directory all of them are in memory."""
    usual: dict[str, Any] = {
        "backend": "native",
        "kv_selection": "speculated",
        "kv_cache_memory_bytes": memory,
    }
    if directory is not None:
        usual |= {"kv_spill_dir": str(directory), "kv_spill_bytes": FILE_BYTES}
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    return make_llm(model_path=model.path, **usual | options)


def least_bytes(directory: Path, **options: Any) -> int:
    """Returns the least memory with which the file is of use, as the refusal says."""
    with pytest.raises(ConfigError, match="the layers that stay in memory") as caught:
        engine(directory, 1, **options)
    found = re.search(r"set kv_cache_memory_bytes to (\d+) or more", str(caught.value))
    assert found is not None
    least = int(found[1])
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes: got"):
        engine(directory, least - 1, **options)
    return least


def results(llm: LLM) -> list[Any]:
    return alone_and_together(llm, PROMPTS, PARAMS)


@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "bf16", "int8", "k8v4"])
def test_what_is_in_a_file_changes_no_bit(kv_cache_dtype, directory):
    options = {"kv_cache_dtype": kv_cache_dtype}
    with engine(None, **options) as llm:
        expected = results(llm)
    least = least_bytes(directory, **options)
    ways: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 7, "threads": 3},
        {},
        {"num_scheduler_steps": 1, "enable_prefix_caching": False},
        {"spec_method": "ngram"},
        {"spec_method": "ngram", "spec_tree_width": 2},
        {"memory": 64 << 20},
        {"kv_spill_ahead": True, "threads": 2},
    ]
    for way in ways if kv_cache_dtype == "bf16" else ways[:1]:
        with engine(directory, **{"memory": least} | options | way) as llm:
            assert results(llm) == expected, way
    assert not list(directory.iterdir())


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_request_goes_on_as_it_would_have(mode, directory):
    long = msgspec.structs.replace(SAMPLED, max_tokens=60, ignore_eos=True)
    with engine(None) as llm:
        expected = [fingerprint(llm.generate(prompt, long)[0]) for prompt in PROMPTS]
    small = {"preemption_mode": mode, "kv_spill_bytes": CHOOSING * 20 * 4096}
    with engine(directory, least_bytes(directory, **small), **small) as llm:
        outputs = llm.generate(PROMPTS, [long] * len(PROMPTS))
        assert llm.get_metrics().num_preemptions > 0
    assert [fingerprint(output) for output in outputs] == expected


def test_beams_and_blocks_that_left_the_device_are_the_same(directory):
    beams = SamplingParams(beam_width=3, n=2, max_tokens=12, ignore_eos=True)
    found = []
    for place in (None, directory / "spilled"):
        stored = {"prefix_cache_dir": str(directory / f"stored-{place is None}")}
        memory = 64 << 20 if place is None else least_bytes(place, **stored)
        with engine(place, memory, **stored) as llm:
            first = [fingerprint(each) for each in llm.generate(PROMPTS[:2], beams)]
            first += [fingerprint(each) for each in llm.generate(PROMPTS, GREEDY)]
        with engine(place, memory, **stored) as llm:
            again = llm.generate(PROMPTS, GREEDY)
            assert sum(each.num_cached_tokens for each in again) > 0
            found.append(first + [fingerprint(each) for each in again])
    assert found[0] == found[1]


def test_memory_keeps_what_was_said_and_counts_what_it_reads(directory):
    least = least_bytes(directory)
    with engine(directory, least) as llm:
        assert llm.info.kv_capacity_tokens == 64 * 16
        llm.generate(PROMPTS, SAMPLED)
        spilled = llm.get_metrics().counters
        assert spilled["kv_spill_found"] > 0 and spilled["kv_spill_wait_seconds"] > 0
        assert spilled["kv_spill_read_bytes"] >= spilled["kv_spill_read"] * 4096 > 0
        assert spilled["kv_spill_written_bytes"] > 0
        kv = core_of(llm).executor.cache_engine.kv
        assert kv.spilled(0)[7] <= CHOOSING * 8
        assert spilled["kv_spill_foreseen"] == 0
    with engine(directory, 64 << 20) as llm:
        llm.generate(PROMPTS, SAMPLED)
        spilled = llm.get_metrics().counters
        assert spilled["kv_spill_read"] == spilled["kv_spill_written_bytes"] == 0
        assert spilled["kv_spill_found"] > 0
    with engine(None) as llm:
        llm.generate([PROMPTS[0]], SAMPLED)
        assert llm.get_metrics().counters == {}


def test_a_plan_says_for_how_many_tokens_there_is_room(directory):
    config = EngineConfig.from_options(
        model=str(tiny_model("llama", num_hidden_layers=LAYERS).path),
        backend="native",
        max_model_len=256,
        kv_selection="speculated",
        kv_cache_memory_bytes=4 << 20,
        kv_spill_dir=str(directory),
        kv_spill_bytes=FILE_BYTES,
    )
    capacity = plan_model(config, memory_bytes=8 << 30).capacity
    assert capacity.kv_tokens == 64 * 16
    assert capacity.max_requests(256) == 4
    assert capacity.request_bytes(16) >= LAYERS * 4096
    budget = capacity.budget()
    assert budget.num_bytes <= 4 << 20
    assert " and 768.0 KiB in a file: 1,024 tokens, 4 requests of 256" in budget.describe()


def test_what_the_next_layer_reads_is_guessed(directory):
    """Most of what one stream asks for is found, since the layer before has it read."""
    found = {}
    for ahead in (False, True):
        with engine(directory, least_bytes(directory), kv_spill_ahead=ahead) as llm:
            llm.generate([PROMPTS[1]], msgspec.structs.replace(SAMPLED, max_tokens=40))
            found[ahead] = llm.get_metrics().counters
    assert found[False]["kv_spill_foreseen"] == 0
    assert 0 < found[True]["kv_spill_foreseen_used"] <= found[True]["kv_spill_foreseen"]
    assert found[True]["kv_spill_read"] < found[False]["kv_spill_read"]


def test_a_read_error_fails_the_steps_requests_and_no_later_ones(directory):
    with engine(directory, least_bytes(directory)) as llm:
        expected = results(llm)
        (number,) = (
            int(link.name)
            for link in Path("/proc/self/fd").iterdir()
            if link.is_symlink() and os.readlink(link).startswith(str(directory))
        )
        kept, (reader, writer) = os.dup(number), os.pipe()
        try:
            os.dup2(reader, number)
            where = r"keys and values could not be (read|written) .*kv_spill_dir at byte \d+: "
            failed = llm.generate(PROMPTS, GREEDY)
            assert all(re.search(where, str(output.error)) for output in failed[1:]), failed
        finally:
            os.dup2(kept, number)
            for each in (kept, reader, writer):
                os.close(each)
        assert llm.reset_prefix_cache()
        assert results(llm) == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "all keys": ({"kv_selection": None}, "kv_spill_dir: requires kv_selection"),
    "no size": ({"kv_spill_bytes": None}, "kv_spill_dir: requires kv_spill_bytes"),
    "no directory": ({"kv_spill_dir": None}, "kv_spill_bytes: requires kv_spill_dir"),
    "a guess alone": (
        {"kv_spill_dir": None, "kv_spill_bytes": None, "kv_spill_ahead": True},
        "kv_spill_ahead: requires kv_spill_dir",
    ),
    "no memory": (
        {"kv_cache_memory_bytes": None},
        "kv_spill_dir: requires kv_cache_memory_bytes",
    ),
    "reference": ({"backend": "reference"}, "not supported with the backend reference"),
    "virtual": (
        {"kv_layout": "virtual", "enable_prefix_caching": False},
        "not supported with kv_layout virtual",
    ),
    "no cache": ({"kv_cache": False}, "not supported without a kv_cache"),
    "draft": (
        {"spec_method": "draft_model", "spec_model": "smollm2"},
        "not supported with spec_method draft_model",
    ),
    "a small file": ({"kv_spill_bytes": 4096}, "kv_spill_bytes: got 4.0 KiB, expected"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_do_not_go_together_are_refused(case, directory):
    options, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        engine(directory, **options)
    assert message in str(caught.value)


def test_directories_that_cannot_hold_the_file_are_refused(directory, monkeypatch):
    if get_file_system(Path("/dev/shm")) == "tmpfs":
        with pytest.raises(ConfigError, match="kv_spill_dir: /dev/shm is on tmpfs"):
            engine(Path("/dev/shm"))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(ConfigError, match=r"kv_spill_dir: .* has 0 B free, requires 768.0 KiB"):
        engine(directory)
