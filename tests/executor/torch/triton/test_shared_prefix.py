"""Splits that several requests share, read once by Triton's kernels: with fixed tiles the same bits
as without sharing, and right.

Groups have ragged prefixes, requests that share more among themselves, windows, several heads a KV
head, and int8.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.executor.batch import StepBatch
from octavo.executor.torch.triton.attention import TritonAttention
from octavo.executor.torch.triton.shared_prefix import array_names, find_sharing
from tests.executor.torch.triton.attention_case import DEVICE, Case

pytestmark = (
    pytest.mark.slow
)  # Triton's interpreter takes its time; test_models.py and test_rows.py always run

CONTEXTS = (600, 530, 830, 257, 520, 860, 300, 40, 513)
LEADERS = {1: (0, 512), 2: (0, 512), 3: (0, 256), 5: (2, 768), 8: (7, 0), 4: (6, 256)}
"""The request that each request begins like, and for how many tokens. 2 and 5 have more in common
with each other than with 0; 4 and 6 are another group."""


def tables() -> np.ndarray:
    made = np.full((len(CONTEXTS), 54), -1, np.int32)
    free = iter(range(1, 1000))
    for request, context in enumerate(CONTEXTS):
        made[request, : -(-context // 16)] = [next(free) for _ in range(-(-context // 16))]
    for request, (leader, count) in sorted(LEADERS.items(), key=lambda item: item[1][1]):
        made[request, : count // 16] = made[leader, : count // 16]
    return made


def batch(rows=(1,) * 9, contexts=CONTEXTS, block_tables=None) -> StepBatch:
    key_indices = np.concatenate(
        [np.arange(0), *(np.arange(n - count, n) for n, count in zip(contexts, rows, strict=True))]
    )
    return StepBatch(
        token_ids=np.zeros(len(key_indices), np.int32),
        key_indices=key_indices.astype(np.int32),
        positions=key_indices[None].astype(np.int32),
        query_starts=np.cumsum([0, *rows]).astype(np.int32),
        context_lens=np.array([contexts], np.int32),
        slots=np.zeros((1, len(key_indices)), np.int32),
        block_tables=(tables() if block_tables is None else block_tables)[None],
        sample_rows=np.arange(len(key_indices), dtype=np.int32),
    )


def runs(found):
    """Returns (slots, splits) of each run."""
    pairs = zip(found.run_slots.tolist(), found.run_splits.tolist(), strict=True)
    return sorted((sorted(slot for slot in slots if slot >= 0), splits) for slots, splits in pairs)


def test_who_shares_what():
    """Requests 0, 1, 2 and 5 read two splits once, which saves more reads than 2 and 5 reading
    three, or 3 joining in one.
    """
    found = find_sharing(batch(), 0, window=None, full=False, rows_per_run=16)
    assert runs(found) == [([0, 1, 2, 5], 2), ([4, 6], 1)]
    assert found.own_splits.tolist() == [2, 2, 2, 0, 1, 2, 1, 0, 0]


def test_a_tile_has_room_for_so_many():
    same = np.tile(np.arange(40, dtype=np.int32), (7, 1))
    alike = batch((1,) * 7, (600,) * 7, same)
    assert [
        len(slots)
        for slots, _ in runs(find_sharing(alike, 0, window=None, full=False, rows_per_run=3))
    ] == [3, 3]
    assert not runs(find_sharing(alike, 0, window=None, full=False, rows_per_run=1))
    assert runs(find_sharing(alike, 0, window=None, full=False, rows_per_run=8)) == [
        (list(range(7)), 2)
    ]


def test_who_does_not():
    two = batch((1, 3, 1) + (1,) * 6)
    assert all(
        1 not in slots or 2 not in slots
        for slots, _ in runs(find_sharing(two, 0, window=None, full=False, rows_per_run=16))
    )
    assert not runs(find_sharing(batch(), 0, window=200, full=False, rows_per_run=16)), (
        "a window has passed the first keys"
    )
    assert runs(find_sharing(batch(), 0, window=520, full=False, rows_per_run=16)) == [([4, 6], 1)]
    empty = batch((), (), np.zeros((0, 54), np.int32))
    assert not runs(find_sharing(empty, 0, window=None, full=False, rows_per_run=16))
    short = batch((1, 1), (255, 255), np.tile(np.arange(16, dtype=np.int32), (2, 1)))
    assert not runs(find_sharing(short, 0, window=None, full=False, rows_per_run=16))


def test_shapes_of_a_captured_step_depend_on_its_requests_only():
    found = find_sharing(batch(), 0, window=None, full=False, rows_per_run=4).padded(4)
    assert (
        found.run_slots.shape == (4, 4)
        and found.run_splits.shape == (4,)
        and found.own_splits.shape == (9,)
    )
    assert runs(found)[0] == ([], 0)


SHAPES = {
    "three a head": Case(heads=9, kv_heads=3, k_width=64, v_width=64),
    "own heads": Case(heads=2, kv_heads=2, k_width=32, v_width=32),
    "seven a head": Case(heads=7, kv_heads=1, k_width=24, v_width=40),
    "wide window": Case(window=900),
    "wide chunk": Case(window=900, chunks=True),
    "full": Case(full=True),
    "sinks and caps": Case(heads=6, kv_heads=2, sinks=True, softcap=5.0),
    "int8": Case(heads=6, kv_heads=2, kv=torch.int8),
    "latent": Case(heads=5, kv_heads=1, k_width=40, v_width=24, latent=True),
}


def shared_case(case: Case, rows=(1,) * 9):
    """Returns a case whose block tables begin alike."""
    case = replace(case, requests=tuple(zip(rows, CONTEXTS, strict=True)), pad=0)
    case.batch.block_tables[0] = tables()
    assert case.num_blocks > case.batch.block_tables.max()
    return case


@pytest.mark.parametrize(
    ("name", "rows"),
    [*((name, (1,) * 9) for name in SHAPES), ("full", (1, 1, 1, 2, 1, 1, 3, 1, 1))],
)
def test_read_together_is_bit_for_bit_what_it_is_one_by_one(name, rows):
    case = shared_case(SHAPES[name], rows)
    kernels = TritonAttention(DEVICE, fixed_tiles=True)
    alone = case.live(kernels.attend(case.call))
    sharing = find_sharing(
        case.batch,
        0,
        window=case.window,
        full=case.full,
        rows_per_run=16 // (case.heads // case.kv_heads),
    )
    assert len(sharing.run_slots), "some rows share"
    together = case.live(kernels.attend(with_sharing(case, sharing)))
    torch.testing.assert_close(together, alone, rtol=0, atol=0)
    np.testing.assert_allclose(together, case.wanted(), rtol=2e-5, atol=2e-5)


def with_sharing(case, sharing):
    names = array_names(0, case.window, full=case.full)
    arrays = (sharing.run_slots, sharing.run_splits, sharing.own_splits)
    found = {
        name: torch.from_numpy(array).to(DEVICE) for name, array in zip(names, arrays, strict=True)
    }
    return replace(case.call, inputs={**case.call.inputs, **found})


def test_what_is_shared_is_read_by_the_shared_runs_alone():
    """A wrong table changes nothing where its row shares: only the leader's table is read."""
    case = shared_case(SHAPES["three a head"])
    sharing = find_sharing(case.batch, 0, window=None, full=False, rows_per_run=5)
    kernels = TritonAttention(DEVICE, fixed_tiles=True)
    wanted = kernels.attend(with_sharing(case, sharing))
    leaders = {int(slots[0]) for slots in sharing.run_slots}
    for slot, splits in enumerate(sharing.own_splits.tolist()):
        if slot not in leaders:
            case.call.block_tables[slot, : splits * 16] = 0
    torch.testing.assert_close(kernels.attend(with_sharing(case, sharing)), wanted, rtol=0, atol=0)


def test_wider_tiles_are_right_too():
    case = shared_case(SHAPES["three a head"])
    sharing = find_sharing(case.batch, 0, window=None, full=False, rows_per_run=10).padded(6)
    found = case.live(TritonAttention(DEVICE).attend(with_sharing(case, sharing)))
    np.testing.assert_allclose(found, case.wanted(), rtol=2e-5, atol=2e-5)
