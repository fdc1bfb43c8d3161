"""Rows from outside, positions on several axes, and rows that see later ones: each backend gives
what a plain formula says.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.executor.batch import StepBatch
from octavo.program.build_family_ops import columns, concat
from octavo.program.builder import Builder
from octavo.program.ops import RopeTable
from octavo.program.program import CacheGroup, Program
from octavo.quant.packed import PackedWeight
from tests.support.paged_runner import backend_named

WIDTH, VOCAB, COUNT = 16, 32, 6
FREQUENCIES = (1.0, 0.5, 0.25, 0.125, 1.0, 0.5, 0.25, 0.125)
AXES = (0, 0, 0, 0, 1, 1, 1, 1)
LIMITS = np.array([1, 4, 4, 4, 5, 6], np.int32)
GENERATOR = np.random.default_rng(7)
TABLE = GENERATOR.standard_normal((VOCAB, WIDTH)).astype(np.float32)
INPUT_ROWS = GENERATOR.standard_normal((2, WIDTH)).astype(np.float32)


def program() -> Program:
    group = CacheGroup("kv", "full", 1, 1, WIDTH, WIDTH)
    b = Builder("test", (group,), VOCAB)
    x = b.scatter_rows(b.embedding(b.token_ids(), "embed", VOCAB, WIDTH))
    turned = b.rope(x, 1, RopeTable(FREQUENCIES, axes=AXES))
    b.kv_write("kv", 0, (turned,), x)
    seen = b.attention(turned, "kv", 0, num_heads=1, scale=0.25, sees_ahead=True)
    return b.finish(rows=b.gather_rows(seen))


def batch(limits: NDArray[np.int32] | None = LIMITS) -> StepBatch:
    key_indices = np.arange(COUNT, dtype=np.int32)
    return StepBatch(
        token_ids=np.array([3, 0, 0, 0, 9, 31], np.int32),
        key_indices=key_indices,
        positions=np.stack([key_indices, key_indices[::-1] // 2]).astype(np.int32),
        query_starts=np.array([0, COUNT], np.int32),
        context_lens=np.array([[COUNT]], np.int32),
        slots=key_indices[None].copy(),
        block_tables=np.zeros((1, 1, 1), np.int32),
        sample_rows=key_indices,
        input_rows=INPUT_ROWS,
        input_row_indices=np.array([-1, 1, 0, 1, -1, -1], np.int32),
        limits=limits,
    )


def expected() -> NDArray[np.float64]:
    step = batch()
    x = TABLE[step.token_ids].astype(np.float64)
    x[1:4] = INPUT_ROWS[[1, 0, 1]]
    angles = step.positions[list(AXES)].T * np.array(FREQUENCIES)
    first, second = x[:, :8], x[:, 8:]
    turned = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles),
         second * np.cos(angles) + first * np.sin(angles)], axis=1,
    )  # fmt: skip
    scores = 0.25 * turned @ turned.T
    scores[np.arange(COUNT) >= LIMITS[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    made: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True) @ x
    return made


@pytest.mark.parametrize("name", ["reference", "native", "torch"])
def test_each_backend_gives_what_the_formula_says(name):
    backend = backend_named(name, dtype="float32", max_tokens=16, max_context=16)
    runnable = backend.prepare_program(program(), lambda weight: PackedWeight.plain(TABLE))
    kv = backend.allocate(runnable.kv_layouts, [1])
    rows = runnable.run(batch(), kv).arrays["rows"]
    np.testing.assert_allclose(rows, expected(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["reference", "native", "torch"])
def test_columns_of_rows_from_outside_are_read_and_concatenated(name):
    b = Builder("test", (), VOCAB)
    base = b.embedding(b.token_ids(), "embed", VOCAB, 4)
    first, given = b.scatter_rows(base), b.input_rows(WIDTH)
    parts = [first, columns(b, given, 13, 3), columns(b, given, 4, 5)]
    joined = b.finish(rows=b.gather_rows(concat(b, parts)))
    backend = backend_named(name, dtype="float32", max_tokens=16, max_context=16)
    table = np.ascontiguousarray(TABLE[:, :4])
    runnable = backend.prepare_program(joined, lambda weight: PackedWeight.plain(table))
    step = batch(None)
    step.context_lens, step.slots = np.zeros((0, 1), np.int32), np.zeros((0, COUNT), np.int32)
    step.block_tables = np.zeros((0, 1, 1), np.int32)
    given = np.zeros((COUNT, WIDTH), np.float32)
    given[:, :4] = table[step.token_ids]
    given[1:4] = INPUT_ROWS[[1, 0, 1]]
    rows = runnable.run(step, backend.allocate(runnable.kv_layouts, [])).arrays["rows"]
    wanted = np.concatenate((given[:, :4], given[:, 13:], given[:, 4:9]), axis=1)
    np.testing.assert_array_equal(rows, wanted)
    step.input_rows = step.input_row_indices = None
    rows = runnable.run(step, backend.allocate(runnable.kv_layouts, [])).arrays["rows"]
    np.testing.assert_array_equal(rows[:, :4], table[step.token_ids])
    assert not rows[:, 4:].any()


def test_native_refuses_a_row_that_does_not_see_itself():
    backend = backend_named("native", dtype="float32", max_tokens=16)
    runnable = backend.prepare_program(program(), lambda weight: PackedWeight.plain(TABLE))
    kv = backend.allocate(runnable.kv_layouts, [1])
    with pytest.raises(ValueError, match="row 2 sees keys up to 2, not its own at 2"):
        runnable.run(batch(np.array([1, 2, 2, 4, 5, 6], np.int32)), kv)
