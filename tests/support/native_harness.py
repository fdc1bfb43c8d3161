"""One op at a time on the native backend: rows of given numbers go in through embeddings, the op's
out comes back as logits.

An embedding of fp32 rows and a gathered row are copies, so what comes back is what the op made, bit
for bit. A table's last row is NaN: padded rows (slot -1) hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.api.errors import BackendUnavailable
from octavo.executor.base import BackendOptions, Runnable
from octavo.executor.batch import StepBatch
from octavo.executor.kv import KvCache
from octavo.executor.native.backend import NativeBackend
from octavo.executor.native.extension import supported_levels
from octavo.executor.reference.backend import ReferenceBackend, ReferenceRunnable
from octavo.program import ops
from octavo.program.program import CacheGroup, Op, Program, Value, Weight
from octavo.quant.packed import PackedWeight

ROWS = (1, 2, 3, 5, 8, 17, 64, 130, 300)
"""Either side of: rows that a thread converts for itself (4), the tile unit's least (6), its 16, a
chunk of logits (64), a piece (128).
"""

NUM_ROWS = max(ROWS)
NOT_BUILT = "not built"


def levels() -> list[str]:
    """Instruction-set levels of this machine, for parametrising; one that fails clearly where the
    extension is not built.
    """
    try:
        return supported_levels()
    except BackendUnavailable:
        return [NOT_BUILT]


def require_native(level: str = "") -> None:
    if NOT_BUILT in (level, *levels()):
        pytest.fail(
            "the native backend is not built; `make test` builds it, or by hand: pip install"
            " --editable '.[dev]'",
            pytrace=False,
        )


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    return (rng(seed).normal(size=shape) * scale).astype(np.float32)


def table(name: str, width: int, num_rows: int = NUM_ROWS) -> Weight:
    """Returns the embedding table of an input: its rows, then one of NaN."""
    return Weight(f"{name}.table", (num_rows + 1, width))


def plain(weights: Mapping[str, NDArray[Any]]) -> dict[str, PackedWeight]:
    return {name: PackedWeight.plain(array) for name, array in weights.items()}


@dataclass(eq=False)
class Case:
    """`inputs [rows, width] fp32` by name, the ops that `make` builds of their Values (the last
    one's first out counts), and weights.

    `out` names another out than that. One of tokens is gathered to become the logits, one of
    samples is them. Tolerances are of
    |native - reference|: `atol + rtol * |reference|`.
    """

    inputs: dict[str, NDArray[np.float32]]
    make: Callable[[dict[str, Value]], list[Op]]
    weights: dict[str, PackedWeight] = field(default_factory=dict)
    positions: NDArray[np.int32] | None = None
    out: int = 0
    rtol: float = 1e-6
    atol: float = 1e-6

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.inputs.values())))

    @cached_property
    def program(self) -> Program:
        ids = Value("ids", "tokens", 1, "int")
        values = {
            name: Value(name, "tokens", array.shape[1]) for name, array in self.inputs.items()
        }
        body: list[Op] = [
            ops.Embedding(value, table(name, value.width, self.num_rows), ids)
            for name, value in values.items()
        ]
        body += self.make(values)
        out = body[-1].outputs[self.out]
        logits = out if out.axis == "samples" else Value("logits", "samples", out.width)
        if logits is not out:
            body.append(ops.GatherRows(out, logits))
        groups = (CacheGroup("kv", "full", 1, 1, 2, 2),)  # its slots tell padding from rows
        program = Program(
            "test", {"token_ids": ids}, {"logits": logits}, tuple(body), groups, out.width
        )
        program.check()
        return program

    def load(self, weight: Weight) -> PackedWeight:
        name, _, kind = weight.name.rpartition(".")
        if kind == "table":
            rows = self.inputs[name]
            return PackedWeight.plain(
                np.concatenate([rows, np.full((1, rows.shape[1]), np.nan, np.float32)])
            )
        return self.weights[weight.name]

    @cached_property
    def expected(self) -> NDArray[np.float64]:
        """All rows on the reference backend."""
        return self.run(
            ReferenceBackend().prepare_program(self.program, self.load), self.num_rows, pad=0
        )

    def native(self, level: str | None, *, threads: int = 1) -> Runnable:
        options = BackendOptions(
            num_threads=threads, max_tokens=self.num_rows + 8, kv_cache_dtype="fp32"
        )
        return NativeBackend(options, level=level).prepare_program(self.program, self.load)

    def run(self, runnable: Runnable, rows: int, *, pad: int = 0) -> NDArray[Any]:
        """Returns the first `rows` rows, followed by `pad` rows of NaN."""
        return runnable.run(self.batch(rows, pad), self.memory(runnable)).arrays["logits"]

    def memory(self, runnable: Runnable) -> KvCache:
        """Returns a KV cache as the runnable wants it."""
        backend = (
            ReferenceBackend()
            if isinstance(runnable, ReferenceRunnable)
            else NativeBackend(BackendOptions())
        )
        return backend.allocate(runnable.kv_layouts, [32])

    def batch(self, rows: int, pad: int) -> StepBatch:
        positions = (
            np.arange(self.num_rows, dtype=np.int32) if self.positions is None else self.positions
        )
        return StepBatch(
            token_ids=np.concatenate([np.arange(rows), np.full(pad, self.num_rows)]).astype(
                np.int32
            ),
            key_indices=np.concatenate([np.arange(rows), np.full(pad, -3)]).astype(np.int32),
            positions=np.concatenate([positions[:rows], np.full(pad, -3)])[None].astype(np.int32),
            query_starts=np.array([0, rows], np.int32),
            context_lens=np.array([[rows]], np.int32),
            slots=np.concatenate([np.arange(rows), np.full(pad, -1)])[None].astype(np.int32),
            block_tables=np.arange(32, dtype=np.int32)[None, None],
            sample_rows=np.arange(rows, dtype=np.int32),
        )


def check_rows(case: Case, level: str) -> None:
    """Native equals the reference within the case's tolerance; any number of rows, padded or not,
    gives each row the same bits.
    """
    runnable = case.native(level)
    whole = case.run(runnable, case.num_rows, pad=3)
    np.testing.assert_allclose(whole, case.expected, rtol=case.rtol, atol=case.atol)
    for rows in ROWS:
        np.testing.assert_array_equal(
            case.run(runnable, rows, pad=rows % 3), whole[:rows], err_msg=f"{rows} rows"
        )
