"""Paged attention of the reference backend against plain softmax over gathered keys (tolerance
1e-12), and its padding.
"""

import numpy as np
import pytest

from octavo.api.errors import BackendUnavailable, WeightMismatch
from octavo.executor.base import BackendOptions
from octavo.executor.batch import StepBatch
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.reference.kv_cache import make_kv_layout
from octavo.program import ops
from octavo.program.builder import Builder
from octavo.program.program import CacheGroup, Program, Value, Weight
from octavo.quant.packed import PackedWeight
from tests.support.kv_layouts import layouts_of

CONTEXTS = (1, 40, 300, 530)


def rng(seed=0):
    return np.random.default_rng(seed)


def build(groups, make):
    """Builds a Program "hidden" -> "out"; `make(builder, hidden)` appends its ops."""
    b = Builder("test", groups)
    hidden = b.hidden(make.width)
    return b.finish(out=make(b, hidden))


class PlainAttention:
    """Attention with q, k and v cut out of the hidden row by Linears with given weights; it attends
    to the keys of earlier steps and this one.
    """

    def __init__(
        self,
        *,
        num_heads=4,
        num_kv_heads=2,
        k_width=6,
        v_width=10,
        mask="causal",
        window=None,
        scale=0.4,
        **options,
    ):
        self.num_heads, self.num_kv_heads, self.k_width, self.v_width = (
            num_heads,
            num_kv_heads,
            k_width,
            v_width,
        )
        self.mask, self.scale, self.options = mask, scale, options
        self.group = CacheGroup(
            "kv", "window" if window else "full", 3, num_kv_heads, k_width, v_width, window
        )
        self.width = 9
        self.weights = {
            name: rng(seed).normal(size=(heads * head_width, self.width)).astype(np.float32)
            for seed, (name, heads, head_width) in enumerate(
                [
                    ("q.weight", num_heads, k_width),
                    ("k.weight", num_kv_heads, k_width),
                    ("v.weight", num_kv_heads, v_width),
                ]
            )
        }
        self.weights |= {
            "sinks": rng(7).normal(size=num_heads).astype(np.float32),
            "table": rng(8).normal(size=(12, num_heads)).astype(np.float32),
        }

    def __call__(self, b, x):
        q = b.linear(x, "q", self.num_heads * self.k_width)
        k = b.linear(x, "k", self.num_kv_heads * self.k_width)
        b.kv_write("kv", 1, (k,), b.linear(x, "v", self.num_kv_heads * self.v_width))
        return b.attention(
            q, "kv", 1, num_heads=self.num_heads, scale=self.scale, mask=self.mask, **self.options
        )

    def prepare_program(self, backend=None):
        program = build((self.group,), self)
        return (backend or ReferenceBackend()).prepare_program(
            program, lambda w: PackedWeight.plain(self.weights[w.name])
        )

    def expected(self, x, visible, score):
        """Returns the rows `[n, H * v_width]` of one request `x [n, W]`; `visible(i, j)` and
        `score(s, h, i, j)` change plain attention.
        """
        q, k, v = (x @ self.weights[f"{name}.weight"].astype(np.float64).T for name in "qkv")
        n = len(x)
        q, k, v = (
            q.reshape(n, self.num_heads, -1),
            k.reshape(n, self.num_kv_heads, -1),
            v.reshape(n, self.num_kv_heads, -1),
        )
        i, j = np.arange(n)[:, None], np.arange(n)[None]
        out = np.zeros((n, self.num_heads, self.v_width))
        for h in range(self.num_heads):
            kv = h * self.num_kv_heads // self.num_heads
            s = np.where(visible(i, j), score(q[:, h] @ k[:, kv].T * self.scale, h, i, j), -np.inf)
            extra = np.full(
                (n, 1), self.weights["sinks"][h] if "sinks" in self.options else -np.inf
            )
            s = np.concatenate([s, extra], axis=1)
            p = np.exp(s - s.max(1, keepdims=True))
            out[:, h] = (p / p.sum(1, keepdims=True))[:, :-1] @ v[:, kv]
        return out.reshape(n, -1)


def step_of(xs, starts, tables, *, pad=0):
    """Makes a step that computes rows starts[r].. of each request; `xs` hold all rows of each."""
    rows = [x[start:] for x, start in zip(xs, starts, strict=True)]
    key_indices = np.concatenate(
        [np.arange(start, len(x)) for x, start in zip(xs, starts, strict=True)]
    )
    slots = np.concatenate(
        [
            [table[p // 16] * 16 + p % 16 for p in range(start, len(x))]
            for x, start, table in zip(xs, starts, tables, strict=True)
        ]
    )
    width = max(map(len, tables))
    return StepBatch(
        token_ids=np.zeros(len(key_indices) + pad, np.int32),
        key_indices=np.concatenate([key_indices, np.full(pad, -5)]).astype(np.int32),
        positions=np.concatenate([key_indices, np.full(pad, -5)])[None].astype(np.int32),
        query_starts=np.cumsum([0, *map(len, rows)]).astype(np.int32),
        context_lens=np.array([[len(x) for x in xs]], np.int32),
        slots=np.concatenate([slots, np.full(pad, -1)])[None].astype(np.int32),
        block_tables=np.array(
            [[[*table, *[-1] * (width - len(table))] for table in tables]], np.int32
        ),
        sample_rows=np.zeros(0, np.int32),
        hidden=np.concatenate([*rows, np.full((pad, xs[0].shape[1]), np.nan)]),
    )


def poisoned(backend, groups, num_blocks=200):
    """Makes a cache of NaN, so that a read of unwritten keys shows."""
    kv = backend.allocate(list(map(make_kv_layout, groups)), [num_blocks] * len(groups))
    for arrays in kv.groups:
        arrays.k[:], arrays.v[:] = np.nan, np.nan
    return kv


def causal(i, j):
    return j <= i


def unchanged(s, h, i, j):
    return s


VARIANTS = {
    "causal": (PlainAttention(), causal, unchanged),
    "one kv head": (PlainAttention(num_heads=3, num_kv_heads=1), causal, unchanged),
    "every head its own": (PlainAttention(num_heads=3, num_kv_heads=3), causal, unchanged),
    "window": (
        PlainAttention(mask="window", window=37),
        lambda i, j: (j <= i) & (j > i - 37),
        unchanged,
    ),
    "window of one": (PlainAttention(mask="window", window=1), lambda i, j: j == i, unchanged),
    "full": (PlainAttention(mask="full"), lambda i, j: j >= 0, unchanged),
    "softcap": (PlainAttention(softcap=1.5), causal, lambda s, h, i, j: 1.5 * np.tanh(s / 1.5)),
    "sinks": (PlainAttention(sinks=Weight("sinks", (4,))), causal, unchanged),
    "alibi": (
        PlainAttention(bias=ops.AlibiBias((0.5, 0.25, 0.1, 0.0))),
        causal,
        lambda s, h, i, j: s + (0.5, 0.25, 0.1, 0.0)[h] * (j - i),
    ),
    "softcap, then alibi": (
        PlainAttention(softcap=1.5, bias=ops.AlibiBias((0.5, 0.25, 0.1, 0.0))),
        causal,
        lambda s, h, i, j: 1.5 * np.tanh(s / 1.5) + (0.5, 0.25, 0.1, 0.0)[h] * (j - i),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_over_pages(variant):
    make, visible, score = VARIANTS[variant]
    runnable, backend = make.prepare_program(), ReferenceBackend()
    xs = [rng(10 + n).normal(size=(n, 9)) for n in CONTEXTS]
    blocks = iter(rng(3).permutation(200))
    tables = [[int(next(blocks)) for _ in range(-(-n // 16))] for n in CONTEXTS]
    kv = poisoned(backend, (make.group,))
    out = runnable.run(step_of(xs, [0] * 4, tables, pad=3), kv).arrays["out"]
    wanted = np.concatenate([make.expected(x, visible, score) for x in xs])
    np.testing.assert_allclose(out[: len(wanted)], wanted, rtol=1e-12, atol=1e-12)
    assert not np.isnan(kv.groups[0].k[1, tables[1][0]]).any(), "written"
    assert np.isnan(kv.groups[0].k[0]).all() and np.isnan(kv.groups[0].k[2]).all(), (
        "other layers are left alone"
    )
    free = [block for block in range(200) if not any(block in table for table in tables)]
    assert np.isnan(kv.groups[0].k[:, free]).all(), "padding wrote nothing"


def test_t5_bias_is_looked_up_by_bucket():
    bias = ops.T5Bias(Weight("table", (12, 4)), 12, 30, bidirectional=True)
    make = PlainAttention(mask="full", bias=bias)

    def bucket(d):
        exact, upper = 3, 6 * (d > 0)
        away = abs(d)
        return upper + (
            away
            if away < exact
            else min(5, exact + int(np.log(away / exact) / np.log(30 / exact) * 3))
        )

    def score(s, h, i, j):
        table = make.weights["table"][:, h]
        return s + np.array(
            [[table[bucket(b - a)] for b in range(s.shape[1])] for a in range(s.shape[0])]
        )

    x = rng(1).normal(size=(60, 9))
    kv = ReferenceBackend().allocate([make_kv_layout(make.group)], [4])
    out = make.prepare_program().run(step_of([x], [0], [[0, 1, 2, 3]]), kv).arrays["out"]
    np.testing.assert_allclose(
        out, make.expected(x, lambda i, j: j >= 0, score), rtol=1e-12, atol=1e-12
    )


def test_keys_out_of_the_window_are_not_read():
    """Blocks behind the window may be freed: their entries in the table, -1, are not read."""
    make, visible, score = VARIANTS["window"]
    x = rng(5).normal(size=(100, 9))
    kv = poisoned(ReferenceBackend(), (make.group,))
    runnable = make.prepare_program()
    runnable.run(step_of([x[:99]], [0], [[3, 1, 4, 0, 5, 9, 2]]), kv)
    out = runnable.run(step_of([x], [99], [[-1, -1, -1, 0, 5, 9, 2]]), kv).arrays["out"]
    np.testing.assert_allclose(out[0], make.expected(x, visible, score)[99], rtol=1e-12)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_latent_attention(form):
    heads, nope, rope, latent, v_width = 3, 5, 4, 7, 6
    shapes = {"n": heads * nope, "r": heads * rope, "c": latent, "k": rope}
    weights = {
        f"{name}.weight": rng(i).normal(size=(width, 8)).astype(np.float32)
        for i, (name, width) in enumerate(shapes.items())
    }
    weights["kv_b"] = rng(9).normal(size=(heads * (nope + v_width), latent)).astype(np.float32)
    b = Builder("test", (CacheGroup("latent", "latent", 1, 1, latent + rope, 0),))
    x = b.hidden(8)
    n, r, c, k = (b.linear(x, name, width) for name, width in shapes.items())
    b.kv_write("latent", 0, (c, k), None)
    kv_b = Weight("kv_b", weights["kv_b"].shape)
    out = b.mla_attention(
        n, r, kv_b, group="latent", layer=0, num_heads=heads, scale=0.3, form=form
    )
    program, backend = b.finish(out=out), ReferenceBackend()
    runnable = backend.prepare_program(program, lambda w: PackedWeight.plain(weights[w.name]))
    rows = rng(4).normal(size=(270, 8))
    step = step_of([rows], [0], [[*range(17)]], pad=2)
    found = (
        runnable.run(step, poisoned(backend, program.groups))
        .arrays["out"][:270]
        .reshape(270, heads, v_width)
    )
    n, r, c, k = (rows @ weights[f"{name}.weight"].astype(np.float64).T for name in "nrck")
    full = (c @ weights["kv_b"].astype(np.float64).T).reshape(270, heads, nope + v_width)
    for h in range(heads):
        s = 0.3 * (
            n.reshape(270, heads, nope)[:, h] @ full[:, h, :nope].T
            + r.reshape(270, heads, rope)[:, h] @ k.T
        )
        p = np.exp(np.where(np.tri(270, dtype=bool), s, -np.inf))
        np.testing.assert_allclose(
            found[:, h], (p / p.sum(1, keepdims=True)) @ full[:, h, nope:], rtol=1e-11, atol=1e-12
        )


def test_copied_blocks_hold_the_same_keys_in_every_layer():
    backend = ReferenceBackend()
    groups = (CacheGroup("a", "full", 2, 1, 4, 4), CacheGroup("b", "full", 1, 1, 2, 2))
    kv = backend.allocate(list(map(make_kv_layout, groups)), [5, 5])
    kv.groups[0].k[:, 1] = rng().normal(size=(2, 16, 1, 4))
    kv.copy_block(0, 1, 3)
    np.testing.assert_array_equal(kv.groups[0].k[:, 3], kv.groups[0].k[:, 1])
    assert (kv.groups[1].k == 0).all()


def test_kv_layout():
    group = CacheGroup("a", "full", 3, 2, 4, 6)
    (layout,) = layouts_of(ReferenceBackend(), (group,))
    assert (layout.block_bytes, layout.dtype) == (3 * 16 * 2 * 10 * 8, "fp64")
    (layout,) = layouts_of(ReferenceBackend(BackendOptions(kv_cache_dtype="bf16")), (group,))
    assert (layout.block_bytes, layout.dtype) == (3 * 16 * 2 * 10 * 2, "bf16")


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            ops.Attention(
                Value("x", "tokens", 4), Value("y", "tokens", 4), "kv", 0, 1, 1.0, "tree"
            ),
            "attention with the mask tree",
        ),
    ],
)
def test_what_it_cannot_run_it_refuses_by_name(op, message):
    x = Value("x", "tokens", 4)
    program = Program(
        "test",
        {"hidden": x},
        {"out": op.outputs[0]},
        (op,),
        (CacheGroup("kv", "full", 1, 1, 4, 4),),
    )
    with pytest.raises(BackendUnavailable) as error:
        ReferenceBackend().prepare_program(program, lambda w: None)
    assert message in str(error.value)


def test_a_weight_of_another_shape_is_a_mismatch():
    make = PlainAttention()
    make.weights["k.weight"] = make.weights["k.weight"][:3]
    with pytest.raises(WeightMismatch, match=r"k.weight has shape \(3, 9\), expected \(12, 9\)"):
        make.prepare_program()
