"""Requests that begin with the same blocks get the same bits read together as one by one, and these
are right.

Covers ragged groups of sharers, those that share more among themselves, windows, several heads for
each kv head, chunks, every type of cache, any number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.reference.backend import ReferenceBackend
from tests.executor.native.test_attention import TOLERANCE, Run, Shape, Span

CONTEXTS = (600, 530, 830, 257, 520, 860, 300, 40, 513)
LEADERS = {1: (0, 512), 2: (0, 512), 3: (0, 256), 5: (2, 768), 8: (7, 0), 4: (6, 256)}
"""Request that each request begins like, and the number of tokens. 2 and 5 have more in common than
with 0; 4 and 6 are another group."""

SHAPES = {
    "three a head": Shape(9, 3, 64, 64, contexts=CONTEXTS),
    "own heads": Shape(2, 2, 32, 32, contexts=CONTEXTS),
    "seven a head": Shape(7, 1, 24, 40, contexts=CONTEXTS),
    "sixteen a head": Shape(16, 1, 32, 32, contexts=CONTEXTS),
    "window": Shape(4, 2, 32, 32, mask="window", window=300, contexts=CONTEXTS),
    "wide window": Shape(4, 2, 32, 32, mask="window", window=560, contexts=CONTEXTS),
    "full": Shape(4, 2, 32, 32, mask="full", contexts=CONTEXTS),
    "sinks and caps": Shape(6, 2, 32, 32, sinks=True, softcap=5.0, contexts=CONTEXTS),
}
NUM_ROWS = (1, 1, 2, 1, 5, 1, 3, 1, 1)
"""Number of rows that each request computes in the last step."""


class SharedRun(Run):
    """A run in which requests that begin alike have the same tokens and the same blocks."""

    def __init__(self, shape: Shape, backend: Any) -> None:
        super().__init__(shape, backend, seed=1, num_blocks=300)
        self.tokens = [self.first[r] + np.arange(n) for r, n in enumerate(shape.contexts)]
        for r, (leader, count) in sorted(LEADERS.items(), key=lambda item: item[1][1]):
            self.tokens[r][:count] = self.tokens[leader][:count]
            self.tables[r][: count // 16] = self.tables[leader][: count // 16]

    def batch(self, spans: list[Span], pad: int) -> Any:
        batch = super().batch(spans, pad)
        batch.token_ids[: len(batch.sample_rows)] = np.concatenate(
            [self.tokens[r][start:stop] for r, start, stop in spans]
        )
        return batch

    def last_rows(self, order: list[int]) -> list[np.ndarray]:
        """Computes the last rows of each request in the order given, all in one step; their keys
        are written first, through rows whose results are dropped.
        """
        starts = [n - rows for n, rows in zip(self.shape.contexts, NUM_ROWS, strict=True)]
        for r, start in enumerate(starts):
            before = self.batch([(r, 0, start)], 0)
            before.query_starts[1] = 0
            self.runnable.run(before, self.kv)
        made = self.step([(r, starts[r], starts[r] + NUM_ROWS[r]) for r in order], pad=2)
        return np.split(made, np.cumsum([NUM_ROWS[r] for r in order])[:-1])


def backend(level: str | None, kv: str, *, threads: int, share: bool) -> NativeBackend:
    options = BackendOptions(
        num_threads=threads, kv_cache_dtype=kv, max_tokens=2048, shared_prefix_attention=share
    )
    return NativeBackend(options, level=level)


ORDER = [4, 0, 3, 7, 1, 8, 2, 6, 5]
CASES = [
    *((name, "bf16", 3) for name in SHAPES),
    *(("three a head", kv, threads) for kv in ("fp32", "int8", "int4") for threads in (1, 2)),
    ("three a head", "bf16", 12),
]
"""Cases; twelve threads share single splits."""


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(("name", "kv", "threads"), CASES)
def test_read_together_is_as_good_as_one_by_one(level, name, kv, threads):
    alone = SharedRun(SHAPES[name], backend(level, kv, threads=1, share=False)).last_rows(ORDER)
    together = SharedRun(SHAPES[name], backend(level, kv, threads=threads, share=True)).last_rows(
        ORDER
    )
    for r, one, other in zip(ORDER, alone, together, strict=True):
        np.testing.assert_array_equal(other, one, err_msg=f"request {r}")


@pytest.mark.parametrize("name", ["three a head", "wide window"])
def test_it_is_right(level, name):
    found = SharedRun(SHAPES[name], backend(level, "fp32", threads=2, share=True)).last_rows(ORDER)
    wanted = SharedRun(
        SHAPES[name], ReferenceBackend(BackendOptions(kv_cache_dtype="fp32"))
    ).last_rows(ORDER)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCE["fp32"], atol=TOLERANCE["fp32"])


def test_shared_blocks_are_read_once(level):
    """The profile counts shared blocks once: five requests of one row, three query heads for each
    kv head, are one piece's fifteen lanes.
    """
    shape = Shape(9, 3, 64, 64, contexts=(600,) * 5)
    read = {}
    for share in (False, True):
        run = Run(shape, backend(level, "bf16", threads=1, share=share), num_blocks=300)
        for table in run.tables[1:]:
            table[:32] = run.tables[0][:32]
        run.runnable.start_profile()
        run.step([(r, 599, 600) for r in range(5)])
        read[share] = next(
            op.num_bytes for op in run.runnable.stop_profile().ops if op.name == "attention"
        )
    of_a_key = 3 * 2 * 64 * 2
    assert read == {False: 5 * 600 * of_a_key, True: (512 + 5 * 88) * of_a_key}
