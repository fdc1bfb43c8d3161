"""The virtual KV layout under the real scheduler and worker, with memory that is lost when it is
given back; then its arithmetic.
"""

from __future__ import annotations

from mmap import PAGESIZE

import numpy as np
import pytest

from octavo.api.errors import ConfigError
from octavo.config.sizes import format_bytes
from octavo.engine.core import EngineCore
from octavo.worker.block_map import (
    NOWHERE,
    RangeShape,
    VirtualBlockMap,
    check_addressable,
    describe_ranges,
)
from tests.support.engine_fakes import expected_tokens, make_core, make_request, run_all, tokens_of
from tests.support.worker_fakes import FakeKv, FakeRunnable, make_worker

PROMPTS = [
    [(7 * i + j) % 900 for j in range(length)] for i, length in enumerate((1, 5, 16, 17, 40, 100))
]


def make(*, num_blocks: int = 64, num_groups: int = 1, **options) -> EngineCore:
    worker = make_worker(FakeRunnable(), num_groups=num_groups, num_blocks=num_blocks, virtual=True)
    return make_core(
        num_blocks=num_blocks,
        num_groups=num_groups,
        executor=worker,
        kv_layout="virtual",
        caching=False,
        **options,
    )


@pytest.mark.parametrize(("budget", "num_groups"), [(7, 1), (64, 2)])
@pytest.mark.parametrize(
    ("num_blocks", "options"),
    [
        (64, {}),
        (9, {"preemption_mode": "swap", "num_host_blocks": 9}),
        (9, {"preemption_mode": "recompute"}),
        (64, {"kv_cache": False}),
    ],
)
def test_tokens_through_the_worker(budget, num_groups, num_blocks, options):
    core = make(budget=budget, num_groups=num_groups, num_blocks=num_blocks, **options)
    for index, prompt in enumerate(PROMPTS):
        core.add(make_request(str(index), prompt, max_tokens=30))
    found = run_all(core)
    for index, prompt in enumerate(PROMPTS):
        assert tokens_of(found[str(index)]) == expected_tokens(prompt, 30)
    stats = core.scheduler.stats()
    assert (stats.num_preemptions > 0) == (num_blocks == 9) and (stats.num_swaps > 0) == (
        "num_host_blocks" in options
    )


def test_samples_of_one_prompt_share_no_block():
    core = make()
    core.add(make_request("p", PROMPTS[4], max_tokens=20))
    for index in (1, 2):
        core.add(
            make_request(f"p_{index}", PROMPTS[4], max_tokens=20, sample_index=index, fork_of="p")
        )
    found = run_all(core)
    for index, request_id in enumerate(("p", "p_1", "p_2")):
        assert tokens_of(found[request_id]) == expected_tokens(PROMPTS[4], 20, index)


@pytest.mark.parametrize("seed", range(8))
def test_requests_come_and_go_in_any_order(seed):
    """With a window beside full attention, swaps and aborts, requests read what they wrote, and no
    memory stays taken.
    """
    rng = np.random.default_rng(seed)
    windows = (None, 24)
    worker = make_worker(FakeRunnable(windows), num_groups=2, num_blocks=14, virtual=True)
    options = {
        "preemption_mode": ("swap", "recompute")[seed % 2],
        "num_host_blocks": 14,
        "budget": int(rng.integers(5, 60)),
    }
    core = make_core(
        num_blocks=14,
        windows=windows,
        executor=worker,
        kv_layout="virtual",
        caching=False,
        **options,
    )
    prompts = {
        str(index): rng.integers(0, 900, int(rng.integers(1, 120))).tolist() for index in range(24)
    }
    found: dict[str, list[int]] = {name: [] for name in prompts}
    waiting, aborted = list(prompts), set()
    while waiting or core.has_work:
        while waiting and rng.random() < 0.3:
            core.add(make_request(waiting[0], prompts[waiting.pop(0)], max_tokens=40))
        if rng.random() < 0.05:
            aborted.add(name := str(rng.choice(list(prompts))))
            core.abort(name)
        for output in core.step().outputs:
            found[output.request_id] += output.token_ids
    for name, prompt in prompts.items():
        assert found[name] == expected_tokens(prompt, 40)[: len(found[name])]
        assert len(found[name]) == 40 or name in aborted
    assert core.scheduler.stats().num_preemptions > 0
    assert (
        worker.cache_engine.block_map.num_bytes == 0 and (worker.cache_engine.kv.tokens == -7).all()
    )


# -- one group's places ----------------------------------------------------------------------------


def block_map_of(
    piece_bytes: int, *, num_ids: int = 8, num_rows: int = 3
) -> tuple[FakeKv, VirtualBlockMap]:
    shape = RangeShape.build(num_ids, 6, (piece_bytes,), 2)
    kv = FakeKv(1, num_rows * shape.num_blocks)
    kv.tokens[:] = 0
    return kv, VirtualBlockMap(kv, [shape], num_rows=num_rows)


def test_a_request_lies_in_one_piece_whatever_its_ids():
    _, block_map = block_map_of(PAGESIZE)
    assert block_map.put(0, 1, 0, [5, 2, 7]).tolist() == [6, 7, 8]
    assert block_map.put(0, 1, 3, [0]).tolist() == [9]
    assert block_map.put(0, 2, 0, [NOWHERE, NOWHERE, 3]).tolist() == [
        NOWHERE,
        NOWHERE,
        14,
    ], "holes stay holes"
    assert [block_map.find(0, block_id) for block_id in (5, 2, 7, 0, 3)] == [6, 7, 8, 9, 14]


def test_memory_is_counted_in_whole_pages_and_given_back_when_the_request_leaves():
    kv, block_map = block_map_of(PAGESIZE // 4)
    for first, pages in ((0, 1), (3, 1), (4, 2)):
        block_map.put(0, 0, first, [first])
        assert block_map.num_bytes == 2 * pages * PAGESIZE, "in each of two layers"
    block_map.put(0, 2, 0, [6])
    block_map.clear(0)
    assert block_map.num_bytes == 2 * PAGESIZE
    assert (kv.tokens.reshape(3, -1)[0] == -7).all() and not (
        kv.tokens.reshape(3, -1)[2] == -7
    ).any()
    assert block_map.find(0, 4) == NOWHERE and block_map.find(0, 6) == 16
    block_map.clear(0)


def test_a_table_that_becomes_shorter_gives_back_the_pages_behind_its_end():
    kv, block_map = block_map_of(PAGESIZE // 2)
    block_map.put(0, 0, 0, [0, 1, 2, 3, 4])
    block_map.put(0, 1, 0, [5])
    block_map.shorten(0, 0, 3)
    assert block_map.num_bytes == 2 * (2 + 1) * PAGESIZE, "half a page is kept whole"
    first, second, _ = kv.tokens.reshape(3, -1)
    assert (first[3 * 16 :] == -7).all() and not (first[: 3 * 16] == -7).any()
    assert not (second == -7).any()
    assert [block_map.find(0, block_id) for block_id in (2, 3, 4)] == [2, NOWHERE, NOWHERE]
    block_map.put(0, 1, 1, [3])
    block_map.put(0, 0, 3, [4])
    assert not (first[: 3 * 16] == -7).any(), "the id had left its place before it went elsewhere"
    block_map.shorten(0, 0, 4)
    assert block_map.find(0, 4) == 3, "nothing lies behind"


def test_an_id_that_goes_elsewhere_takes_its_memory_along():
    """The id is that of a block behind a window; no query reads it, nor what lies before it."""
    kv, block_map = block_map_of(PAGESIZE)
    block_map.put(0, 0, 0, [0, 1, 2, 3])
    block_map.put(0, 1, 0, [1])
    assert block_map.num_bytes == 2 * 3 * PAGESIZE
    assert (kv.tokens[0, : 2 * 16] == -7).all() and not (kv.tokens[0, 2 * 16 :] == -7).any()
    block_map.put(0, 0, 4, [0])
    assert block_map.num_bytes == 2 * 4 * PAGESIZE and block_map.find(0, 0) == 4


@pytest.mark.parametrize(
    ("piece", "num_blocks"),
    [(PAGESIZE, 6), (2 * PAGESIZE, 6), (PAGESIZE // 4, 8), (PAGESIZE * 3 // 2, 6), (96, 128)],
)
def test_ranges_share_no_page(piece, num_blocks):
    shape = RangeShape.build(8, 6, (piece,), 1)
    assert shape.num_blocks == num_blocks and shape.num_blocks * piece % PAGESIZE == 0


def test_what_is_said_at_the_start():
    ranges = [RangeShape(8, 8, (1024,), 2), RangeShape(8, 8, (4 * PAGESIZE,), 1)]
    addresses = 4 * 8 * (2 * 1024 + 4 * PAGESIZE)
    text = (
        f"{format_bytes(addresses)} of addresses for 4 requests; each request may use up to"
        f" {format_bytes(2 * (PAGESIZE - 1024))} more"
    )
    assert text in describe_ranges(ranges, num_rows=4)


def test_what_slots_cannot_number_is_refused():
    shape = RangeShape.build(8, 1 << 20, (PAGESIZE,), 1)
    check_addressable([shape], num_rows=127)
    with pytest.raises(
        ConfigError, match="kv_layout: virtual requires addresses for 2,147,483,648 tokens"
    ):
        check_addressable([shape], num_rows=128)


def test_no_more_blocks_have_memory_than_there_are_ids():
    rng = np.random.default_rng(0)
    _, block_map = block_map_of(PAGESIZE, num_rows=4)
    ends = [0] * 4
    for _ in range(2000):
        row = int(rng.integers(4))
        if ends[row] == 6 or rng.random() < 0.1:
            block_map.clear(row)
            ends[row] = 0
        block_map.put(0, row, ends[row], [int(rng.integers(8))])
        ends[row] += 1
        assert block_map.num_bytes <= 8 * 2 * PAGESIZE
