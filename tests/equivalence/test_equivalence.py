"""A request's tokens and logprobs are bitwise those of the request alone, however it is scheduled
and wherever its KV lies.

One table of ways, each with the evidence that things went that way; other files take each way
apart. Through LLM, on tiny models (windows among them) on every backend, and on the real SmolLM2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError, InvalidRequest
from octavo.checkpoint.catalogue import resolve
from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.protocol.stats import EngineStats
from tests.support.llm_tools import GREEDY, PENALISED, SAMPLED, fingerprint, make_llm, prompts_of


@dataclass(frozen=True)
class Setup:
    backend: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)

    def llm(self, *, num_blocks: int | None = None, **options: Any) -> LLM:
        """Builds an LLM with `num_blocks` blocks in every group, for no window bounds it where many
        requests may run.
        """
        if num_blocks is not None:
            with self.llm(kv_cache_memory_bytes=1 << 26, max_num_seqs=4096) as llm:
                block_bytes = (1 << 26) // (llm.info.kv_capacity_tokens // 16)
            options["kv_cache_memory_bytes"] = block_bytes * num_blocks
        path = resolve("smollm2") if self.model == "smollm2" else None
        return make_llm(
            self.model,
            model_path=path,
            backend=self.backend,
            **{"max_model_len": 192, **self.options, **options},
        )

    def refuses(self, **options: Any) -> bool:
        """Tells whether the backend refuses these options, and checks that it says so."""
        if self.backend != "torch" or options.get("kv_layout") != "virtual":
            return False
        with pytest.raises(
            ConfigError, match="kv_layout: virtual is not supported by the torch backend"
        ):
            self.llm(**options)
        return True


SETUPS = [
    pytest.param(Setup("reference", "llama"), id="reference-llama"),
    pytest.param(Setup("native", "llama", {"quantization": "int8"}), id="native-llama-int8"),
    pytest.param(Setup("native", "llama", {"kv_cache_dtype": "int4"}), id="native-llama-int4-kv"),
    pytest.param(Setup("native", "gemma3_text", {"dtype": "bfloat16"}), id="native-gemma3-bf16"),
    pytest.param(Setup("torch", "llama"), id="torch-llama", marks=pytest.mark.slow),
    pytest.param(
        Setup("native", "smollm2"), id="native-smollm2", marks=(pytest.mark.model, pytest.mark.slow)
    ),
]

PROMPTS = prompts_of(150, 33, 47, 20, 90)
PARAMS = [
    msgspec.structs.replace(given, max_tokens=24)
    for given in (
        SAMPLED,
        GREEDY,
        SamplingParams(n=3, temperature=1.2, seed=7, ignore_eos=True, logprobs=2),
        PENALISED,
        SAMPLED,
    )
]


BEAMS = [
    given if index in (0, 3) else SamplingParams(n=2, beam_width=3, max_tokens=24, logprobs=1)
    for index, given in enumerate(PARAMS)
]
"""Parameters of three searches beside two samples."""


@dataclass(frozen=True)
class Way:
    """A way that requests may take."""

    options: dict[str, Any]
    evidence: Callable[[EngineStats], bool] = lambda stats: True
    """Tells from the engine's counters at the end whether things went this way."""
    num_rounds: int = 1
    num_engines: int = 1
    """Number of engines, one after the other, each with the files of the one before."""


FEW = {"num_blocks": 16, "enable_prefix_caching": False}
SWAPPED, RECOMPUTED = {**FEW, "preemption_mode": "swap"}, {**FEW, "preemption_mode": "recompute"}
CONTIGUOUS = {"kv_layout": "virtual", "enable_prefix_caching": False}
WHOLE = {"enable_chunked_prefill": False}


def was_swapped(stats: EngineStats) -> bool:
    return stats.num_swaps > 0


def was_recomputed(stats: EngineStats) -> bool:
    return stats.num_preemptions > stats.num_swaps == 0


WAYS: dict[str, Way] = {
    "all together": Way({}),
    "in chunks": Way({"max_num_batched_tokens": 23}, lambda stats: stats.num_steps > 340 // 23),
    "static batches": Way({"batching": "static", "max_num_seqs": 3}),
    "dynamic batches": Way({"batching": "dynamic", "batch_window_ms": 5, "max_num_seqs": 3}),
    "no batches": Way({"batching": "none"}, lambda stats: stats.num_steps >= 7 * 24),
    "prompts held back": Way({**WHOLE, "scheduler_delay_factor": 2.0, "max_num_seqs": 3}),
    "no KV cache": Way({"kv_cache": False}),
    "swapped": Way(SWAPPED, was_swapped),
    "recomputed": Way(RECOMPUTED, was_recomputed),
    "found in the prefix cache": Way({}, lambda stats: stats.prefix_hit_tokens > 300, num_rounds=2),
    "found in host memory": Way(
        {"num_blocks": 16, "kv_offloading_size": "64MiB", "max_num_seqs": 1},
        lambda stats: stats.connector.num_loaded > 10,
        num_rounds=2,
    ),
    "found on disk": Way({}, lambda stats: stats.connector.num_fetched > 10, num_engines=2),
    "contiguous": Way(CONTIGUOUS),
    "contiguous, swapped": Way(CONTIGUOUS | SWAPPED, was_swapped),
    "contiguous, recomputed": Way(CONTIGUOUS | RECOMPUTED, was_recomputed),
    "contiguous, no KV cache": Way({**CONTIGUOUS, "kv_cache": False}),
}


@pytest.fixture(scope="module", params=SETUPS)
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.param


def answers(llm: LLM, params: list[SamplingParams] = PARAMS) -> list[Any]:
    return [fingerprint(output) for output in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain(setup: Setup) -> list[Any]:
    """Runs each sample by itself, with nothing found or shared."""
    with setup.llm(max_num_seqs=1, enable_prefix_caching=False) as llm:
        return answers(llm)


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("way", WAYS)
def test_is_plain(setup: Setup, plain: list[Any], way: str, tmp_path: Path) -> None:
    given = WAYS[way]
    options = dict(given.options)
    if setup.refuses(**options):
        return
    if given.num_engines > 1:
        options["prefix_cache_dir"] = str(tmp_path)
    for _ in range(given.num_engines):
        with setup.llm(**options) as llm:
            for _ in range(given.num_rounds):
                assert answers(llm) == plain
            stats = llm.get_metrics()
    assert given.evidence(stats), stats


@pytest.mark.parametrize("layout", ["paged", "virtual"])
def test_forked_is_plain(
    setup: Setup, plain: list[Any], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked samples equal plain ones; the two beside the first share its blocks, where blocks can
    be shared.
    """
    forks: list[str] = []
    fork = BlockManager.fork
    monkeypatch.setattr(BlockManager, "fork", lambda *given: (forks.append(given[2]), fork(*given)))
    if setup.refuses(kv_layout=layout, enable_prefix_caching=False):
        return
    with setup.llm(kv_layout=layout, enable_prefix_caching=False) as llm:
        assert answers(llm) == plain
    assert len(forks) == (2 if layout == "paged" else 0)


@pytest.fixture(scope="module")
def plain_beams(setup: Setup) -> list[Any]:
    """Runs each search by itself: its beams are all that runs at once."""
    with setup.llm(max_num_seqs=3, enable_prefix_caching=False) as llm:
        return [
            fingerprint(llm.generate(prompt, params)[0])
            for prompt, params in zip(PROMPTS, BEAMS, strict=True)
        ]


SHARING = [
    way
    for way, given in WAYS.items()
    if given.options.get("kv_cache", True) and "kv_layout" not in given.options
]


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("way", [way for way in SHARING if way != "no batches"])
def test_beams_are_plain(setup: Setup, plain_beams: list[Any], way: str, tmp_path: Path) -> None:
    """Beams equal those of a search alone where requests may share blocks and three sequences run
    at once; elsewhere they are refused by name.
    """
    given = WAYS[way]
    options = {**given.options, "max_num_seqs": max(3, given.options.get("max_num_seqs", 8))}
    if given.num_engines > 1:
        options["prefix_cache_dir"] = str(tmp_path)
    for _ in range(given.num_engines):
        with setup.llm(**options) as llm:
            for _ in range(given.num_rounds):
                assert answers(llm, BEAMS) == plain_beams
            stats = llm.get_metrics()
    if "preemption_mode" in options:
        assert given.evidence(stats), stats


@pytest.mark.parametrize("way", ["contiguous", "no KV cache"])
def test_beams_that_could_share_nothing_are_refused(setup: Setup, way: str) -> None:
    if setup.refuses(**WAYS[way].options):
        return
    with (
        setup.llm(**WAYS[way].options) as llm,
        pytest.raises(InvalidRequest, match="beam search requires shared KV blocks"),
    ):
        llm.generate(PROMPTS[1], BEAMS[1])
