"""The virtual KV layout gives bitwise what the paged one gives, and the system really gives and
takes back its memory.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import msgspec
import pytest

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError
from octavo.worker.cache_engine import CacheEngine
from octavo.worker.worker import Worker
from tests.support.llm_tools import (
    GREEDY,
    PENALISED,
    SAMPLED,
    core_of,
    fingerprint,
    make_llm,
    prompts_of,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory on demand is Linux's")

SETUPS = [
    ("reference", "llama", {}),
    ("native", "llama", {"dtype": "float32"}),
    ("native", "qwen3", {"kv_cache_dtype": "int8"}),
    ("native", "qwen3", {"kv_cache_dtype": "k8v4"}),
    ("native", "gemma3_text", {"dtype": "bfloat16"}),
]
"""Backends and models; the last one has windows of 24 tokens beside full attention."""

PROMPTS = prompts_of(5, 33, 47, 20, 150)
LONG = [
    msgspec.structs.replace(given, max_tokens=40)
    for given in (GREEDY, SAMPLED, PENALISED, SAMPLED, GREEDY)
]

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "two at once": {"max_num_seqs": 2},
    "static": {"batching": "static"},
    "no KV cache": {"kv_cache": False},
    "swapped": {"preemption_mode": "swap", "num_blocks": 14, "max_model_len": 192},
    "recomputed": {
        "preemption_mode": "recompute",
        "num_blocks": 14,
        "max_model_len": 192,
        "max_num_batched_tokens": 30,
    },
}


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: "-".join(setup[:2]))
def setup(request: pytest.FixtureRequest) -> Any:
    return request.param


def make(
    setup: Any, layout: str = "virtual", *, num_blocks: int | None = None, **options: Any
) -> LLM:
    """Makes an engine of `num_blocks` blocks in every group: where as many requests may run, no
    window bounds them.
    """
    backend, family, precision = setup
    options = {
        "backend": backend,
        "kv_layout": layout,
        "enable_prefix_caching": False,
        **precision,
        **options,
    }
    if num_blocks is None:
        return make_llm(family, **options)
    with make(setup, "paged", kv_cache_memory_bytes=1 << 26, max_num_seqs=4096) as llm:
        block_bytes = (1 << 26) // (llm.info.kv_capacity_tokens // 16)
    return make_llm(family, **options | {"kv_cache_memory_bytes": block_bytes * num_blocks})


@pytest.fixture(scope="module")
def paged(setup: Any) -> list[Any]:
    with make(setup, "paged") as llm:
        return [fingerprint(output) for output in llm.generate(PROMPTS, LONG)]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("way", WAYS)
def test_virtual_is_paged(setup: Any, paged: list[Any], way: str) -> None:
    with make(setup, **WAYS[way]) as llm:
        assert [fingerprint(output) for output in llm.generate(PROMPTS, LONG)] == paged
        stats = llm.get_metrics()
    assert (stats.num_preemptions > 0) == ("num_blocks" in WAYS[way]) and (stats.num_swaps > 0) == (
        way == "swapped"
    )


def test_samples_of_one_prompt_are_those_that_share_blocks(setup: Any) -> None:
    forked = SamplingParams(
        n=4, temperature=1.2, seed=7, max_tokens=20, ignore_eos=True, logprobs=2
    )
    with make(setup, "paged") as llm:
        expected = fingerprint(llm.generate(PROMPTS[2], forked)[0])
    with make(setup) as llm:
        assert fingerprint(llm.generate(PROMPTS[2], forked)[0]) == expected


# -- memory ----------------------------------------------------------------------------------------


def cache_engine(llm: LLM) -> CacheEngine:
    worker = core_of(llm).executor
    assert isinstance(worker, Worker)
    return worker.cache_engine


def given_bytes(llm: LLM) -> int:
    """Returns the bytes that the system says it has given for K and V (mincore)."""
    kv: Any = cache_engine(llm).kv
    groups = range(2 if "gemma" in llm.config.model.model else 1)
    return sum(
        _resident_bytes(address, num_bytes)
        for group in groups
        for address, num_bytes in kv.spans(group)
    )


def _resident_bytes(address: int, num_bytes: int) -> int:
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages) == 0, (
        ctypes.get_errno()
    )
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def test_memory_is_given_as_requests_grow_and_taken_back_when_they_leave(setup: Any) -> None:
    with make(setup, max_num_batched_tokens=32, max_num_seqs=64) as llm:
        block_map = cache_engine(llm).block_map
        assert given_bytes(llm) == block_map.num_bytes == 0
        streams = [llm.stream(prompt, params) for prompt, params in zip(PROMPTS, LONG, strict=True)]
        seen = []
        while streams:
            for stream in list(streams):
                if next(stream, None) is None:
                    streams.remove(stream)
            seen.append(given_bytes(llm))
            assert seen[-1] <= block_map.num_bytes, "never more than is counted, in whole pages"
        kv: Any = cache_engine(llm).kv
        assert 0 < max(seen) < sum(num_bytes for _, num_bytes in kv.spans(0)) / 3, (
            "addresses are not memory"
        )
        llm.generate(PROMPTS[0], GREEDY)
        one = given_bytes(llm)
        assert one <= block_map.num_bytes and one < max(seen) / 3, "all others' is given back"


def test_an_engine_that_falls_idle_holds_nothing(setup: Any) -> None:
    with make(setup) as llm:
        llm.generate(PROMPTS, LONG)
        core = core_of(llm)
        assert given_bytes(llm) > 0
        while core.has_work:
            core.step()
        assert given_bytes(llm) == 0


def test_what_is_counted_is_what_the_system_gave_once_every_block_is_written(setup: Any) -> None:
    with make(setup) as llm:
        stream = llm.stream(prompts_of(64)[0], msgspec.structs.replace(GREEDY, max_tokens=2))
        next(stream)
        next(stream)  # its 65th token's block has been written now
        assert given_bytes(llm) == cache_engine(llm).block_map.num_bytes
        stream.close()


def test_a_window_gives_back_what_it_has_passed() -> None:
    setup = ("native", "gemma3_text", {"dtype": "float32"})
    with make(setup, max_num_batched_tokens=16, max_num_seqs=1) as llm:
        llm.generate(prompts_of(200)[0], GREEDY)
        kv: Any = cache_engine(llm).kv
        full, window = (
            sum(_resident_bytes(*span) for span in kv.spans(group)) for group in range(2)
        )
        blocks = core_of(llm).scheduler.blocks.pools[1].num_blocks
    assert blocks < 10 and 0 < window < full


# -- refusals --------------------------------------------------------------------------------------


def test_prefix_caching_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError,
        match="kv_layout: virtual is not supported with enable_prefix_caching",
    ):
        make_llm(kv_layout="virtual")


@pytest.mark.parametrize("option", ["prefix_cache_dir", "kv_offloading_size"])
def test_so_is_the_prefix_cache_off_the_device(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}: requires kv_cache and enable_prefix_caching"):
        make_llm(kv_layout="virtual", enable_prefix_caching=False, **{option: "1MiB"})


def test_so_is_a_backend_that_gives_no_memory_on_demand() -> None:
    with pytest.raises(
        ConfigError, match="kv_layout: virtual is not supported by the torch backend"
    ):
        make_llm(kv_layout="virtual", enable_prefix_caching=False, backend="torch")
