"""Thresholds on inputs of products and on gates: what the reference makes of them, what the native
backend does, and which rows they are for.
"""

from __future__ import annotations

import numpy as np
import pytest

from octavo.api.errors import ConfigError
from octavo.executor.base import BackendOptions
from octavo.executor.batch import StepBatch
from octavo.executor.native.backend import NativeBackend
from octavo.executor.reference.backend import ReferenceBackend
from octavo.program.builder import Builder
from octavo.program.passes.fuse import fuse
from octavo.program.program import Program
from octavo.quant.packed import PackedWeight
from octavo.sparsity.activation_curves import LEVELS, ActivationCurve, greedy_shares
from octavo.sparsity.passes.sparsify import Thresholds, sparsify
from tests.support.native_harness import require_native

ROWS, WIDTH, VOCAB = 9, 40, 24
SPARSE_FROM = np.array([4, 2], np.int32)
QUERY_STARTS = np.array([0, 6, ROWS], np.int32)
"""Two requests: key indices 0 to 5 and 1 to 3, so that rows 4, 5, 7 and 8 are sparse."""

IS_SPARSE = np.array([0, 0, 0, 0, 1, 1, 0, 1, 1], np.bool_)


def program() -> Program:
    build = Builder("toy", vocab_size=VOCAB)
    x = build.embedding(build.token_ids(), "table", ROWS, WIDTH)
    gate, up = build.linear(x, "gate", WIDTH), build.linear(x, "up", WIDTH)
    hidden = build.linear(build.act_mul(gate, up, "silu"), "down", WIDTH)
    return build.finish(logits=build.linear(build.gather_rows(hidden), "head", VOCAB))


def weights_of(of: Program) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {w.name: random.normal(size=w.shape).astype(np.float32) for w in of.weights}


def batch() -> StepBatch:
    key_indices = np.array([0, 1, 2, 3, 4, 5, 1, 2, 3], np.int32)
    return StepBatch(
        token_ids=np.arange(ROWS, dtype=np.int32),
        key_indices=key_indices,
        positions=key_indices[None],
        query_starts=QUERY_STARTS,
        context_lens=np.zeros((0, 2), np.int32),
        slots=np.zeros((0, ROWS), np.int32),
        block_tables=np.zeros((0, 2, 1), np.int32),
        sample_rows=np.arange(ROWS, dtype=np.int32),
        sparse_from=SPARSE_FROM,
    )


def logits(backend, of: Program, weights, given: StepBatch) -> np.ndarray:
    runnable = backend.prepare_program(of, lambda weight: PackedWeight.plain(weights[weight.name]))
    return runnable.run(given, backend.allocate(runnable.kv_layouts, [])).arrays["logits"]


def silu(x):
    return x / (1 + np.exp(-x))


def expected(weights, inputs: float, gates: float, downs: float) -> np.ndarray:
    """Computes the toy with thresholds, row by row."""
    w = {name.removesuffix(".weight"): array.astype(np.float64) for name, array in weights.items()}
    rows = []
    for row, is_sparse in enumerate(IS_SPARSE):
        x = w["table"][row]
        x = np.where(is_sparse & (abs(x) < inputs), 0, x)
        opened = silu(w["gate"] @ x)
        hidden = np.where(is_sparse & (abs(opened) < gates), 0, opened * (w["up"] @ x))
        hidden = np.where(is_sparse & (abs(hidden) < downs), 0, hidden)
        rows.append(w["head"] @ (w["down"] @ hidden))
    return np.array(rows)


@pytest.mark.parametrize("name", ["reference", "native"])
def test_thresholds_make_zeros_of_small_numbers_in_sparse_rows(name):
    plain = program()
    weights = weights_of(plain)
    names = {w.name.split(".")[0]: w.name for w in plain.weights}
    inputs, gates, downs = 0.7, 0.4, 1.5
    found = sparsify(
        plain,
        Thresholds(
            {names["gate"]: inputs, names["up"]: inputs, names["down"]: downs},
            {names["gate"]: gates},
        ),
    )
    if name == "native":
        require_native()
        backend = NativeBackend(BackendOptions(max_tokens=ROWS, dtype="float32"))
    else:
        backend = ReferenceBackend()
    want = expected(weights, inputs, gates, downs)
    tolerance = {"rtol": 1e-4, "atol": 1e-4 * abs(want).max()}
    np.testing.assert_allclose(logits(backend, found, weights, batch()), want, **tolerance)
    np.testing.assert_allclose(logits(backend, fuse(found), weights, batch()), want, **tolerance)
    dense = batch()
    dense.sparse_from = None
    np.testing.assert_allclose(
        logits(backend, found, weights, dense)[~IS_SPARSE], want[~IS_SPARSE], **tolerance
    )
    assert not np.allclose(logits(backend, found, weights, dense)[IS_SPARSE], want[IS_SPARSE])


def test_a_threshold_without_a_place_is_refused():
    with pytest.raises(ConfigError, match="nowhere, which is no matmul weight of toy"):
        sparsify(program(), Thresholds({"nowhere": 0.1}))


def test_greedy_shares_reach_the_target_where_it_costs_least():
    def curve(name: str, size: int, loss: float) -> ActivationCurve:
        return ActivationCurve([name], size, [*LEVELS], [loss * level**2 for level in LEVELS])

    curves = {0: curve("dear", 300, 0.9), 1: curve("cheap", 100, 0.1)}
    shares = greedy_shares(curves, 0.5)
    assert shares[0] * 300 + shares[1] * 100 == pytest.approx(200)
    assert shares[1] > shares[0]
    assert greedy_shares(curves, 0.0) == {0: 0.0, 1: 0.0}
