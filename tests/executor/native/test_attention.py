"""Paged attention of the native backend against the reference at every level: |native - reference|
<= 2e-5 for values of size one.

K and V are compared as stored (fp32, bf16 or codes, the reference rounding alike). With a bf16
cache native rounds the queries to bf16 too (and so the reference gets rounded ones), and the
weights of the values, each by at most 1 in 2^9, which is what its tolerance allows. With a cache of
codes both become integers of 15 bits; only on the tile unit bf16.

However its rows come (whole, in chunks, one by one, alone or with others, on one thread or several,
in whatever blocks) a request's outputs are bitwise the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo.executor.base import BackendOptions
from octavo.executor.batch import StepBatch
from octavo.executor.native.backend import NativeBackend
from octavo.executor.reference.backend import ReferenceBackend
from octavo.program import ops
from octavo.program.program import CacheGroup, Program, Value, Weight
from octavo.quant.packed import PackedWeight
from tests.support.kv_layouts import layouts_of
from tests.support.native_harness import normal, require_native, rng

CONTEXTS = (1, 37, 256, 540)
"""Requests of a case: within a block, within a split of 256 keys, a split, and over three of them.
"""

NUM_BLOCKS = 128
TOLERANCE = {"fp32": 2e-5, "bf16": 4e-3, "int8": 8e-3, "k8v4": 2e-2, "int4": 2e-2}
"""Codes: a number that lies between two codes may be rounded to one in float64 and to the other in
fp32.
"""


@dataclass(frozen=True)
class Shape:
    """The shape of an attention: heads, widths, mask."""

    heads: int = 4
    kv_heads: int = 2
    k_width: int = 24
    v_width: int = 24
    mask: str = "causal"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: float | None = None
    """Steepest slope of ALiBi, halved from head to head."""
    sharpness: float = 1.0
    contexts: tuple[int, ...] = CONTEXTS

    @cached_property
    def program(self) -> Program:
        """A Program of one attention, whose q, k and v are rows of three tables."""
        ids = Value("ids", "tokens", 1, "int")
        widths = {
            "q": self.heads * self.k_width,
            "k": self.kv_heads * self.k_width,
            "v": self.kv_heads * self.v_width,
        }
        q, k, v = (Value(name, "tokens", width) for name, width in widths.items())
        out, logits = (
            Value(name, axis, self.heads * self.v_width)
            for name, axis in (("out", "tokens"), ("logits", "samples"))
        )
        group = CacheGroup(
            "kv",
            "window" if self.window else "full",
            2,
            self.kv_heads,
            self.k_width,
            self.v_width,
            self.window,
        )
        sinks = Weight("sinks", (self.heads,)) if self.sinks else None
        scale = self.sharpness / self.k_width**0.5
        body = (
            *(
                ops.Embedding(value, Weight(value.name, (self.num_tokens + 1, value.width)), ids)
                for value in (q, k, v)
            ),
            ops.KvWrite((k,), v, "kv", 1),
            ops.Attention(
                q,
                out,
                "kv",
                1,
                self.heads,
                scale,
                self.mask,
                self.window,
                self.softcap,
                sinks,
                self.bias,
            ),
            ops.GatherRows(out, logits),
        )
        program = Program("test", {"token_ids": ids}, {"logits": logits}, body, (group,), out.width)
        program.check()
        return program

    @property
    def bias(self) -> ops.AlibiBias | None:
        if self.alibi is None:
            return None
        return ops.AlibiBias(tuple(self.alibi / 2**head for head in range(self.heads)))

    @property
    def num_tokens(self) -> int:
        return sum(self.contexts)

    def load(self, weight: Weight) -> PackedWeight:
        if weight.name == "sinks":
            return PackedWeight.plain(normal(self.heads, seed=9))
        rows = normal(*weight.shape, seed="qkv".index(weight.name))
        rows[-1] = np.nan
        return PackedWeight.plain(rows)

    def load_rounded(self, weight: Weight) -> PackedWeight:
        """Returns a weight whose queries are rounded, as the attention of a bf16 cache reads
        them.
        """
        packed = self.load(weight)
        return (
            packed
            if weight.name != "q"
            else PackedWeight.plain(packed.codes.astype(ml_dtypes.bfloat16).astype(np.float32))
        )


Span = tuple[int, int, int]
"""(request, start, stop): tokens of one request that a step computes."""


class Run:
    """A backend with a cache, in which each request has shuffled blocks."""

    def __init__(
        self,
        shape: Shape,
        backend: Any,
        *,
        seed: int = 0,
        rounded: bool = False,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.shape = shape
        self.runnable = backend.prepare_program(
            shape.program, shape.load_rounded if rounded else shape.load
        )
        self.kv = backend.allocate(self.runnable.kv_layouts, [num_blocks])
        self.first = np.cumsum([0, *shape.contexts])
        blocks = iter(rng(seed).permutation(num_blocks))
        self.tables = [
            np.array([next(blocks) for _ in range(-(-n // 16))], np.int32) for n in shape.contexts
        ]

    def step(self, spans: list[Span], *, pad: int = 0) -> np.ndarray:
        """Computes one step; returns every row's output."""
        return self.runnable.run(self.batch(spans, pad), self.kv).arrays["logits"]

    def batch(self, spans: list[Span], pad: int) -> StepBatch:
        at = [np.arange(start, stop) for _, start, stop in spans]
        rows = [len(part) for part in at]
        tokens = [self.first[r] + part for (r, _, _), part in zip(spans, at, strict=True)]
        slots = [
            self.tables[r][part // 16] * 16 + part % 16
            for (r, _, _), part in zip(spans, at, strict=True)
        ]
        tables = np.full((1, len(spans), max(map(len, self.tables))), -1, np.int32)
        for index, (r, _, stop) in enumerate(spans):
            tables[0, index, : -(-stop // 16)] = self.tables[r][: -(-stop // 16)]
        return StepBatch(
            token_ids=np.concatenate([*tokens, [self.shape.num_tokens] * pad]).astype(np.int32),
            key_indices=np.concatenate([*at, [0] * pad]).astype(np.int32),
            positions=np.concatenate([*at, [0] * pad])[None].astype(np.int32),
            query_starts=np.cumsum([0, *rows]).astype(np.int32),
            context_lens=np.array([[stop for _, _, stop in spans]], np.int32),
            slots=np.concatenate([*slots, [-1] * pad])[None].astype(np.int32),
            block_tables=tables,
            sample_rows=np.arange(sum(rows), dtype=np.int32),
        )

    def whole(self, *, pad: int = 0) -> np.ndarray:
        """Computes all rows of all requests in one step."""
        return self.step([(r, 0, n) for r, n in enumerate(self.shape.contexts)], pad=pad)

    def steps(self, steps: list[list[Span]], *, pad: int = 0) -> np.ndarray:
        """Computes the rows of `whole` in the given steps."""
        out = np.full((self.shape.num_tokens, self.shape.program.vocab_size), np.nan, np.float32)
        for spans in steps:
            made = self.step(spans, pad=pad)
            for r, start, stop in spans:
                out[self.first[r] + start : self.first[r] + stop], made = (
                    made[: stop - start],
                    made[stop - start :],
                )
        return out


def native(level: str | None, kv: str = "fp32", *, threads: int = 1) -> NativeBackend:
    return NativeBackend(
        BackendOptions(num_threads=threads, kv_cache_dtype=kv, max_tokens=2048), level=level
    )


@cache
def expected(shape: Shape, kv: str, rounded: bool) -> np.ndarray:
    return Run(shape, ReferenceBackend(BackendOptions(kv_cache_dtype=kv)), rounded=rounded).whole()


def check(shape: Shape, level: str, kv: str) -> None:
    found = Run(shape, native(level, kv)).whole(pad=2)
    rounded = kv == "bf16" or (kv == "int8" and level == "amx" and shape.k_width % 32 == 0)
    np.testing.assert_allclose(
        found, expected(shape, kv, rounded), rtol=TOLERANCE[kv], atol=TOLERANCE[kv]
    )


SHORT = (5, 16, 270)
HEADS = {
    "one head": Shape(1, 1, 8, 8, contexts=SHORT),
    "own heads": Shape(3, 3, 32, 32, contexts=SHORT),
    "three a head": Shape(9, 3, 64, 64, contexts=SHORT),
    "four a head": Shape(8, 2, 80, 80, contexts=SHORT),
    "eight a head": Shape(8, 1, 128, 128, contexts=SHORT),
    "sixteen a head": Shape(16, 1, 24, 24, contexts=SHORT),
    "seven a head": Shape(14, 2, 64, 64, contexts=SHORT),
    "odd widths": Shape(4, 2, 7, 13, contexts=SHORT),
    "wide values": Shape(2, 1, 24, 130, contexts=SHORT),
}
MASKS = {
    "causal": Shape(),
    "window": Shape(mask="window", window=37),
    "window of one": Shape(mask="window", window=1, contexts=SHORT),
    "window over splits": Shape(mask="window", window=300),
    "chunk": Shape(mask="chunk", window=37),
    "chunk of a split": Shape(mask="chunk", window=256),
    "chunk over splits": Shape(mask="chunk", window=300, sinks=True),
    "full": Shape(mask="full"),
    "softcap": Shape(softcap=1.5, sharpness=4, contexts=SHORT),
    "sinks": Shape(sinks=True, contexts=SHORT),
    "sinks in a window": Shape(mask="window", window=5, sinks=True, softcap=30.0, contexts=SHORT),
    "alibi": Shape(alibi=0.5),
    "alibi with a cap and sinks": Shape(alibi=0.1, softcap=1.5, sinks=True, contexts=SHORT),
    "alibi in a window": Shape(alibi=1.0, mask="window", window=37, contexts=SHORT),
    "sharp": Shape(sharpness=40, contexts=SHORT),
}


@pytest.mark.parametrize("kv", TOLERANCE)
@pytest.mark.parametrize("name", HEADS)
def test_heads(level, name, kv):
    check(HEADS[name], level, kv)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(level, name, kv):
    check(MASKS[name], level, kv)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("width", [8, 24, 32, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1), (8, 1)])
@pytest.mark.parametrize(
    "mask",
    [{}, {"mask": "window", "window": 100}, {"mask": "full"}, {"softcap": 2.0, "sinks": True}],
    ids=str,
)
def test_every_shape(level, heads, kv_heads, width, mask, kv):
    check(Shape(heads, kv_heads, width, width, **mask), level, kv)


# -- bitwise, however the rows come ----------------------------------------------------------------

ORDERS = {
    "causal": MASKS["causal"],
    "window": MASKS["window over splits"],
    "chunk": MASKS["chunk over splits"],
    "sinks": Shape(8, 1, 64, 64, sinks=True),
    "alibi": Shape(8, 1, 64, 64, alibi=0.5),
    "five a head": Shape(5, 1, 32, 32),
}


def chunks(shape: Shape, size: int) -> list[list[Span]]:
    """Returns steps of `size` rows at most, each of one request alone."""
    return [
        [(r, start, min(start + size, n))]
        for r, n in enumerate(shape.contexts)
        for start in range(0, n, size)
    ]


def mixed(shape: Shape) -> list[list[Span]]:
    """Requests that join and leave: chunks of some beside single rows of others."""
    left, at, steps, generator = list(shape.contexts), [0] * len(shape.contexts), [], rng(12)
    while any(left):
        spans = []
        for r in generator.permutation(len(left)):
            size = min(left[r], int(generator.choice([0, 1, 1, 3, 60, 257])))
            if size:
                spans.append((int(r), at[r], at[r] + size))
                left[r], at[r] = left[r] - size, at[r] + size
        if spans:
            steps.append(spans)
    return steps


@pytest.fixture(scope="module")
def whole():
    """`(shape, level, kv)` to its outputs in one step on one thread, computed once."""
    known = {}

    def get(shape, level, kv):
        if (shape, level, kv) not in known:
            known[shape, level, kv] = Run(shape, native(level, kv)).whole()
        return known[shape, level, kv]

    return get


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_in_company(level, name, kv, threads, whole):
    shape = ORDERS[name]
    run = Run(shape, native(level, kv, threads=threads), seed=3)
    np.testing.assert_array_equal(run.steps(mixed(shape), pad=2), whole(shape, level, kv))


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kv", ["bf16", "int8", "k8v4", "int4"])
@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize(("size", "threads"), [(1, 2), (7, 1), (16, 2), (255, 7), (257, 2)])
def test_rows_in_chunks(level, name, size, threads, kv, whole):
    """One row of a long context on two threads and more is shared out by splits, whose partials a
    second stage merges.
    """
    shape = ORDERS[name]
    run = Run(shape, native(level, kv, threads=threads), seed=4)
    np.testing.assert_array_equal(run.steps(chunks(shape, size)), whole(shape, level, kv))


def test_full_attention_on_many_threads(level, whole):
    """Encoders compute all rows at once."""
    shape = MASKS["full"]
    found = Run(shape, native(level, "bf16", threads=3), seed=5).whole(pad=1)
    np.testing.assert_array_equal(found, whole(shape, level, "bf16"))


# -- blocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["bf16", "int8", "k8v4", "int4"])
def test_what_earlier_requests_left_in_a_block_is_not_seen(level, kv):
    """Their keys and values may be NaN."""
    shape = Shape(contexts=(40, 40))
    wanted = Run(shape, native(level, kv)).step([(0, 0, 21)])
    used = Run(shape, native(level, kv))
    used.tables[1] = used.tables[0]
    for at in range(40):
        used.first[1] = (
            shape.num_tokens - at
        )  # whatever its position, its token is the tables' row of NaN
        assert np.isnan(used.step([(1, at, at + 1)])).all()
    np.testing.assert_array_equal(used.step([(0, 0, 21)]), wanted)


def test_keys_out_of_the_window_are_not_read(level):
    """Their blocks may be freed: the table says -1."""
    shape = Shape(mask="window", window=37, contexts=(100,))
    run = Run(shape, native(level))
    wanted = run.whole()[99]
    run.tables[0] = run.tables[0].copy()
    run.tables[0][:3] = -1
    np.testing.assert_array_equal(run.step([(0, 99, 100)])[0], wanted)


@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8", "k8v4", "int4"])
def test_a_copied_block_holds_the_same_keys(level, kv):
    shape = Shape(contexts=(40,))
    run = Run(shape, native(level, kv))
    wanted = run.whole()[39]
    free = int(np.setdiff1d(np.arange(NUM_BLOCKS), run.tables[0])[0])
    run.kv.copy_block(0, int(run.tables[0][1]), free)
    run.tables[0] = np.array([run.tables[0][0], free, run.tables[0][2]], np.int32)
    np.testing.assert_array_equal(run.step([(0, 39, 40)])[0], wanted)


@pytest.mark.parametrize("kv", ["k8v4", "int4"])
def test_packed_codes_are_those_of_the_reference(level, kv):
    """A row that sees itself alone reads its value as stored, but for the rounding of sums that are
    rotated back.
    """
    shape = Shape(3, 3, 40, 96, mask="window", window=1, contexts=(40,))
    found = Run(shape, native(level, kv)).whole()
    stored = Run(shape, ReferenceBackend(BackendOptions(kv_cache_dtype=kv))).whole()
    np.testing.assert_allclose(found, stored, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kv", ["k8v4", "int4"])
def test_packed_codes_of_gemma_3s_heads_in_chunks(level, kv):
    """Its 270M model has one KV head of 256 numbers."""
    shape = Shape(4, 1, 256, 256, mask="window", window=200, contexts=(40, 300))
    found = Run(shape, native(level, kv, threads=2)).steps(chunks(shape, 37))
    np.testing.assert_array_equal(found, Run(shape, native(level, kv)).whole())


def test_int8_stores_what_the_reference_stores(level):
    """Both store the same values of each head, as read out by a row that sees itself alone."""
    shape = Shape(3, 3, 7, 21, mask="window", window=1, contexts=(40,))
    found = Run(shape, native(level, "int8")).whole()
    np.testing.assert_array_equal(
        found,
        Run(shape, ReferenceBackend(BackendOptions(kv_cache_dtype="int8")))
        .whole()
        .astype(np.float32),
    )


def test_layouts_of_the_caches_types():
    require_native()
    group = CacheGroup("kv", "full", 3, 2, 7, 20)
    bf16, fp32, int8, k8v4, int4 = (
        layouts_of(NativeBackend(BackendOptions(kv_cache_dtype=dtype)), (group,))[0]
        for dtype in ("bf16", "fp32", "int8", "k8v4", "int4")
    )
    assert (bf16.dtype, bf16.layer_bytes, bf16.block_bytes) == (
        "bf16",
        2 * 16 * 2 * (8 + 32),
        3 * bf16.layer_bytes,
    )
    assert (fp32.dtype, fp32.layer_bytes) == ("fp32", 2 * bf16.layer_bytes)
    assert (int8.dtype, int8.layer_bytes) == ("int8", bf16.layer_bytes // 2 + 2 * 64)
    assert (int4.dtype, int4.layer_bytes) == ("int4", 2 * 16 * (8 + 64) // 2 + 2 * 64)
    assert (k8v4.dtype, k8v4.layer_bytes) == ("k8v4", 2 * 16 * (8 + 64 // 2) + 2 * 64)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("slots", NUM_BLOCKS * 16, "slot 2048 is outside the KV memory"),
        ("slots", -2, "slot -2 is outside the KV memory"),
        ("block_tables", NUM_BLOCKS, "block 128 is outside the KV memory"),
        ("block_tables", -1, "block -1 is outside the KV memory"),
        ("context_lens", 50, "a context of 50 keys with 3 blocks"),
        ("sample_rows", 40, "sampled row 40 of 40"),
    ],
)
def test_what_lies_outside_is_refused_before_anything_is_computed(name, value, message):
    require_native()
    run = Run(Shape(contexts=(40,)), native(None))
    batch = run.batch([(0, 0, 40)], 0)
    getattr(batch, name)[..., 0] = value
    with pytest.raises(ValueError, match=message):
        run.runnable.run(batch, run.kv)
