"""A prefix cache that engines share in a pool: what is found there is as good as computed, and
whatever the pool does is a miss at worst.

Bitwise. The store is a dict, and Mooncake's own where it is installed.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.api.errors import BackendUnavailable, ConfigError
from octavo.distributed import pool_tiers
from octavo.engine.protocol.stats import EngineStats
from tests.support.fake_store import FakeStore
from tests.support.free_ports import free_port
from tests.support.llm_tools import GREEDY, PENALISED, SAMPLED, fingerprint, make_llm, prompts_of
from tests.support.store_pool import StorePool, require_mooncake_store
from tests.support.tiers import tier

PROMPTS = prompts_of(120, 130, 17, 200)
PARAMS = [GREEDY, SAMPLED, PENALISED, SAMPLED]
HITS = [112, 128, 16, 192]
POOL = "mooncake://127.0.0.1:1"


def answers(family: str = "llama", **options: Any) -> tuple[list[Any], list[int], EngineStats]:
    """Returns what an engine answers, the tokens that it found, and its counters."""
    with make_llm(family, backend="native", **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        stats = llm.get_metrics()
    assert stats.num_used_blocks == 0
    found = [fingerprint(output) for output in outputs]
    return found, [output.num_cached_tokens for output in outputs], stats


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[FakeStore]:
    """Makes the next engines' pools dicts of the same values; each new store comes last."""
    made: list[FakeStore] = []
    values: dict[str, bytes] = {}

    def make(master: str, *, lends_bytes: int, num_replicas: int) -> FakeStore:
        made.append(FakeStore(values))
        return made[-1]

    monkeypatch.setattr(pool_tiers, "check_pool", lambda text: text)
    monkeypatch.setattr(pool_tiers, "MooncakePool", make)
    return made


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_another_engine_has_stored_is_as_good_as_computed(stores, family: str) -> None:
    expected, hits, _ = answers(family)
    assert hits == [0] * 4
    for wanted in ([0] * 4, HITS):
        found, hits, stats = answers(family, kv_pool=POOL)
        assert (found, hits) == (expected, wanted)
        assert (stats.connector.num_fetched > 0) == (wanted[0] > 0)
    assert all(store.closed for store in stores)


def harm(values: dict[str, bytes]) -> None:
    for key in list(values)[::2]:
        values[key] = values[key][:-1] + bytes([values[key][-1] ^ 1])


def lose(values: dict[str, bytes]) -> None:
    for key in list(values)[::3]:
        del values[key]


@pytest.mark.parametrize("happens", [harm, lose], ids=lambda happens: happens.__name__)
def test_blocks_that_fail_are_computed(stores, happens: Callable[[dict[str, bytes]], None]) -> None:
    expected, _, _ = answers(kv_pool=POOL)
    happens(stores[0].values)
    found, hits, stats = answers(kv_pool=POOL)
    assert found == expected and hits != HITS
    assert stats.connector.num_not_fetched > 0


@pytest.mark.parametrize("what", ["fails_reads", "fails_writes"])
def test_a_store_that_fails_changes_no_answer(stores, monkeypatch, what: str) -> None:
    expected, _, _ = answers(kv_pool=POOL)
    make = pool_tiers.MooncakePool

    def failing(*args: Any, **options: Any) -> FakeStore:
        store = make(*args, **options)
        setattr(store, what, True)
        return store

    monkeypatch.setattr(pool_tiers, "MooncakePool", failing)
    found, hits, _ = answers(kv_pool=POOL)
    assert found == expected
    assert hits == ([0] * 4 if what == "fails_reads" else HITS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_pool": "redis://x:1"}, "kv_pool: got 'redis://x:1', expected mooncake://HOST:PORT"),
        ({"kv_pool": "mooncake://nowhere"}, "kv_pool: got 'nowhere', expected HOST:PORT"),
        ({"kv_pool_lends": 1}, "kv_pool_lends: requires kv_pool"),
        ({"kv_pool": POOL, "prefix_cache_dir": "/x"}, "kv_pool: not supported with prefix_cache"),
        ({"kv_pool": POOL, "kv_transfer": "zmq"}, "kv_transfer: not supported with kv_pool"),
        ({"kv_pool": POOL, "enable_prefix_caching": False}, "kv_pool: requires kv_cache"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm("llama", backend="native", **options)


def test_a_package_that_is_missing_is_named_before_anything_loads(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(BackendUnavailable, match="mooncake cannot be imported") as refused:
        make_llm("llama", backend="native", kv_pool=POOL)
    assert "pip install mooncake-transfer-engine-non-cuda" in str(refused.value.hint)


# -- Mooncake's own --------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[StorePool]:
    """Starts a master and two store nodes."""
    require_mooncake_store()
    pool = StorePool(2)
    yield pool
    pool.close()


@pytest.fixture
def master(pool: StorePool) -> str:
    return pool.url


NUM_FAULTS = {"sample": 0, "all": 2, "soak": 20}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_answer_is_wrong_whatever_breaks(pool: StorePool) -> None:
    """Engines that share a pool ask as one store node is killed or stopped, and later is there
    again, by a seed.
    """
    expected, _, _ = answers()
    for seed in range(NUM_FAULTS[tier()]):
        draw = random.Random(seed)
        at = draw.randrange(len(pool.nodes))
        node, kills = pool.nodes[at], draw.random() < 0.5

        def harm(node: subprocess.Popen[str] = node, *, kills: bool = kills) -> None:
            node.send_signal(signal.SIGKILL if kills else signal.SIGSTOP)

        later = threading.Timer(draw.uniform(0, 2), harm)
        later.start()
        for _ in range(3):
            assert answers(kv_pool=pool.url)[0] == expected, f"seed {seed}"
        later.join()
        if kills:
            node.wait()
            pool.nodes[at] = pool.start_node()
        else:
            node.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_a_pool_of_mooncakes_own(master: str) -> None:
    expected, _, _ = answers()
    for wanted in ([0] * 4, HITS):
        found, hits, stats = answers(kv_pool=master)
        assert (found, hits) == (expected, wanted)
    assert stats.connector.num_fetched > 0


@pytest.mark.slow
def test_nothing_listens_there() -> None:
    require_mooncake_store()
    with pytest.raises(ConfigError, match=r"kv_pool: no response from 127\.0\.0\.1"):
        make_llm("llama", backend="native", kv_pool=f"mooncake://127.0.0.1:{free_port()}")
