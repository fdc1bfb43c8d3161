"""Ranks that meet through shared memory and through gloo exchange the same bits, and a rank that
waits for one that never comes is set free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.api.errors import EngineDead
from octavo.executor.native.extension import native_module
from octavo.executor.native.ranks import SharedMemory, SharedMemoryRanks
from octavo.executor.rank_grid import RankGrid
from octavo.executor.torch.ranks import Rendezvous, TorchRanks

WIDTHS = (5, 0, 9)
"""Columns of each of three ranks, one of which has none."""


def on_each(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Calls each function in a thread of its own; returns what they return, in order."""
    found: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        found[at] = calls[at]()

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def shared(num_ranks: int, num_experts: int = 1) -> list[SharedMemoryRanks]:
    memory = SharedMemory()
    num_tensor = num_ranks // num_experts
    ranks = [
        SharedMemoryRanks(RankGrid(rank, num_tensor or num_ranks, num_experts), memory.address)
        for rank in range(num_ranks)
    ]
    memory.close()
    return ranks


def parts(shape: tuple[int, ...], num_ranks: int) -> list[NDArray[np.float32]]:
    """Returns numbers whose sum depends on the order in which they are added."""
    numbers = np.random.default_rng(3).normal(size=(num_ranks, *shape))
    return list((numbers * 10.0 ** np.arange(num_ranks)[:, None, None]).astype(np.float32))


@pytest.mark.parametrize("shape", [(1, 7), (33, 700)], ids=str)
def test_sums_are_the_same_bits_on_every_transport(shape: tuple[int, int]) -> None:
    """All of them add in rank order: ((a + b) + c), whatever place of the array it is."""
    given = parts(shape, 3)
    wanted = (given[0] + given[1]) + given[2]
    rendezvous = Rendezvous(3)
    gloo = on_each(
        [
            lambda rank=rank: TorchRanks(
                RankGrid(rank, 3), "cpu", rendezvous if rank == 0 else rendezvous.address
            )
            for rank in range(3)
        ]
    )
    sums = on_each(
        [lambda r=r, x=x: r.all_reduce(x) for r, x in zip(shared(3), given, strict=True)]
    )
    by_gloo = on_each(
        [
            lambda r=r, x=x: r.all_reduce(torch.from_numpy(x)).numpy()
            for r, x in zip(gloo, given, strict=True)
        ]
    )
    for found in (*sums, *by_gloo):
        assert np.array_equal(found, wanted)


def test_columns_and_the_first_ranks_bytes() -> None:
    ranks = shared(3)
    given = [np.full((6, width), rank, np.float32) for rank, width in enumerate(WIDTHS)]
    joined = on_each(
        [lambda r=r, x=x: r.all_gather(x, WIDTHS) for r, x in zip(ranks, given, strict=True)]
    )
    for found in joined:
        assert np.array_equal(found, np.concatenate(given, axis=1))
    ids = [np.arange(4, dtype=np.int32) + 10 * rank for rank in range(3)]
    on_each([lambda r=r, x=x: r.from_first(x) for r, x in zip(ranks, ids, strict=True)])
    assert all(np.array_equal(found, np.arange(4)) for found in ids)


@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
def test_ranks_of_experts_collect_rows_and_sum_within_their_own_group(transport: str) -> None:
    """Ranks 0 and 1 share out the heads of the first experts, 2 and 3 those of the second."""
    grids = [RankGrid(rank, 2, 2) for rank in range(4)]
    assert [list(grid.tensor_ranks) for grid in grids] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [list(grid.expert_ranks) for grid in grids] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    turn: Callable[[NDArray[Any]], Any] = torch.from_numpy
    if transport == "gloo":
        store = Rendezvous(4)
        ranks: Sequence[Any] = on_each(
            [
                lambda grid=grid: TorchRanks(grid, "cpu", store.address if grid.rank else store)
                for grid in grids
            ]
        )
    else:
        ranks, turn = shared(4, 2), np.asarray
    given = parts((5, 40_000), 4)  # rows of more bytes than a slot has at first
    owners = np.array([0, 1, 1, 0, 1])
    found = on_each(
        [
            lambda r=r, x=x: (
                np.asarray(r.collect(turn(x), turn(owners))),
                np.asarray(r.all_reduce(turn(x))),
            )
            for r, x in zip(ranks, given, strict=True)
        ]
    )
    for grid, (rows, total) in zip(grids, found, strict=True):
        for row, owner in enumerate(owners):
            assert np.array_equal(rows[row], given[grid.expert_ranks[owner]][row])
        first, second = (given[rank] for rank in grid.tensor_ranks)
        assert np.array_equal(total, first + second)


def test_a_wait_for_a_rank_that_never_comes_ends_when_it_is_aborted() -> None:
    waiting, other = shared(2)
    failures: list[Exception] = []

    def wait() -> None:
        try:
            waiting.from_first(np.zeros(3, np.int32))
        except EngineDead as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()
    other.abort()
    thread.join(5)
    assert not thread.is_alive() and "another rank has ended" in str(failures[0])
    with pytest.raises(native_module().RanksAborted):
        other.all_reduce(np.zeros(2, np.float32))


def test_what_is_no_place_among_the_ranks_is_refused() -> None:
    memory = SharedMemory()
    with pytest.raises(ValueError, match="rank 2 of 2"):
        SharedMemoryRanks(RankGrid(2, 2), memory.address)
    memory.close()
    with pytest.raises(RuntimeError, match="no file of the ranks"):
        SharedMemoryRanks(RankGrid(0, 2), -1)
    (alone,) = shared(1)
    with pytest.raises(ValueError, match="not the columns of all ranks"):
        alone.shared.all_gather(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32), [3])
