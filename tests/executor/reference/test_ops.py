"""Each op of the reference backend equals torch's own or a formula written out independently, in
float64, on odd shapes.

Tolerance 1e-12 relative unless said otherwise.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers.activations import XIELUActivation

from octavo.executor.batch import StepBatch
from octavo.executor.reference.backend import FORMULAS
from octavo.executor.reference.step import ReferenceStep
from octavo.program import expert_ops, family_ops, ops
from octavo.program.program import Program, Value, Weight

ROWS = [0, 1, 3, 17]


def rng(seed=0):
    return np.random.default_rng(seed)


def value(name, width, dtype="float"):
    return Value(name, "tokens", width, dtype)


def weight(name, *shape):
    return Weight(name, shape)


def batch_of(num_rows, positions=None):
    """Makes a step of one request's rows, without any cache."""
    return StepBatch(
        token_ids=np.zeros(num_rows, np.int32),
        key_indices=np.arange(num_rows, dtype=np.int32),
        positions=np.arange(num_rows, dtype=np.int32)[None]
        if positions is None
        else np.array([positions], np.int32),
        query_starts=np.array([0, num_rows], np.int32),
        context_lens=np.zeros((0, 1), np.int32),
        slots=np.zeros((0, num_rows), np.int32),
        block_tables=np.zeros((0, 1, 0), np.int32),
        sample_rows=np.zeros(0, np.int32),
    )


def run(op, values, weights=(), batch=None):
    """Returns what the op makes; `values` and `weights` by name."""
    num_rows = len(next(iter(values.values()))) if values else 0
    step = ReferenceStep(
        Program("test", {}, {}, (op,)),
        {w: dict(weights)[w.name] for w in op.weights},
        batch or batch_of(num_rows),
        [],
    )
    step.values |= values
    with np.errstate(all="ignore"):
        made = FORMULAS[type(op)](op, step)
    for out, array in zip(op.outputs, made, strict=True):
        assert array.shape[-1] == out.width or out.axis == "expert_rows"
    return made if len(made) > 1 else made[0]


def close(found, wanted, rtol=1e-12):
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=1e-13)


def torched(*arrays):
    return [torch.tensor(array) for array in arrays]


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("width", "group"), [(5, 0), (37, 0), (36, 12), (21, 7)])
def test_rms_norm(num_rows, width, group):
    x, w = rng().normal(size=(num_rows, width)), rng(1).normal(size=group or width)
    op = ops.RmsNorm(
        value("x", width), value("y", width), weight("w", group or width), 1e-5, 1.0, group
    )
    groups = torch.tensor(x).reshape(num_rows, width // (group or width), group or width)
    wanted = F.rms_norm(groups, groups.shape[-1:], torch.tensor(w + 1.0), 1e-5).reshape(
        num_rows, width
    )
    close(run(op, {"x": x}, {"w": w}), wanted)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(num_rows, bias):
    x, w, c = rng().normal(size=(num_rows, 19)) * 3, rng(1).normal(size=19), rng(2).normal(size=19)
    op = ops.LayerNorm(
        value("x", 19), value("y", 19), weight("w", 19), weight("c", 19) if bias else None, 1e-3
    )
    tx, tw, tc = torched(x, w, c)
    close(
        run(op, {"x": x}, {"w": w, "c": c}), F.layer_norm(tx, (19,), tw, tc if bias else None, 1e-3)
    )


@pytest.mark.parametrize("num_rows", ROWS)
def test_merged_linear_cuts_its_columns(num_rows):
    x, r = rng().normal(size=(num_rows, 11)), rng(1).normal(size=(num_rows, 12))
    a, b, c = rng(2).normal(size=(5, 11)), rng(3).normal(size=(7, 11)), rng(4).normal(size=7)
    weights = {"a": a, "b": b, "c": c}
    op = ops.Linear(
        value("x", 11),
        (value("p", 4), value("q", 8)),
        (weight("a", 5, 11), weight("b", 7, 11)),
        (None, weight("c", 7)),
    )
    whole = np.concatenate([x @ a.T, x @ b.T + c], axis=1)
    p, q = run(op, {"x": x}, weights)
    close(p, whole[:, :4])
    close(q, whole[:, 4:])
    op = ops.Linear(
        value("x", 11), (value("p", 12),), op.weights_, op.biases, "relu", value("r", 12)
    )
    close(run(op, {"x": x, "r": r}, weights), np.maximum(whole, 0) + r)


@pytest.mark.parametrize("centered", [True, False])
def test_linear_with_its_norm_and_gate(centered):
    x = rng().normal(size=(4, 9)) * 2
    weights = {
        "n": rng(1).normal(size=9),
        "g": rng(2).normal(size=(6, 9)),
        "u": rng(3).normal(size=(6, 9)),
    }
    norm = ops.PreNorm(
        weight("n", 9), 1e-6, weight_offset=0.0 if centered else 1.0, centered=centered
    )
    op = ops.Linear(
        value("x", 9),
        (value("y", 6),),
        (weight("g", 6, 9), weight("u", 6, 9)),
        norm=norm,
        gate=ops.Gate("silu", 0.7, 1.7, 1.0),
    )
    tx, tn, tg, tu = torched(x, weights["n"], weights["g"], weights["u"])
    h = F.layer_norm(tx, (9,), tn, None, 1e-6) if centered else F.rms_norm(tx, (9,), tn + 1, 1e-6)
    gate, up = (h @ tg.T).clamp(max=0.7), (h @ tu.T).clamp(-0.7, 0.7)
    close(run(op, {"x": x}, weights), gate * torch.sigmoid(1.7 * gate) * (up + 1))


def test_a_row_of_a_linear_does_not_depend_on_the_others():
    """A row of a Linear is bitwise the same whatever the others are; a product of whole matrices
    would fail here.
    """
    x, a = rng().normal(size=(33, 129)), rng(1).normal(size=(65, 129))
    op = ops.Linear(value("x", 129), (value("y", 65),), (weight("a", 65, 129),))
    whole = run(op, {"x": x}, {"a": a})
    for t in (0, 16, 32):
        np.testing.assert_array_equal(run(op, {"x": x[t : t + 1]}, {"a": a})[0], whole[t])


ACTS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("activation", ACTS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_activations(activation, num_rows):
    x, up = rng().normal(size=(num_rows, 13)) * 20, rng(1).normal(size=(num_rows, 13))
    wanted = ACTS[activation](torch.tensor(x))
    close(run(ops.Act(value("x", 13), value("y", 13), activation), {"x": x}), wanted)
    op = ops.ActMul(value("x", 13), value("u", 13), value("y", 13), activation)
    close(run(op, {"x": x, "u": up}), wanted * torch.tensor(up))


def test_xielu():
    x = rng().normal(size=(5, 13)) * 4
    x[0] = [0, *np.linspace(-2e-6, 2e-6, 12)]
    activation = XIELUActivation(dtype=torch.float64)
    weights = {name: getattr(activation, name).detach() for name in ("alpha_p", "alpha_n")}
    weights |= {name: getattr(activation, name)[None] for name in ("beta", "eps")}
    op = family_ops.Xielu(value("x", 13), value("y", 13), *(weight(name, 1) for name in weights))
    arrays = {name: each.numpy() for name, each in weights.items()}
    close(run(op, {"x": x}, arrays), activation(torch.tensor(x)).detach())


def test_clamped_gate():
    gate, up = rng().normal(size=(3, 7)) * 10, rng(1).normal(size=(3, 7)) * 10
    op = ops.ActMul(value("g", 7), value("u", 7), value("y", 7), "silu", 7.0, 1.702, 1.0)
    tg, tu = torch.tensor(gate).clamp(max=7), torch.tensor(up).clamp(-7, 7)
    close(run(op, {"g": gate, "u": up}), (tu + 1) * tg * torch.sigmoid(1.702 * tg))


def test_elementwise():
    a, b, one = rng().normal(size=(5, 6)), rng(1).normal(size=(5, 6)), rng(2).normal(size=(5, 1))
    va, vb, out = value("a", 6), value("b", 6), value("o", 6)
    close(run(ops.Add(va, vb, out), {"a": a, "b": b}), a + b)
    close(run(ops.Mul(va, vb, out), {"a": a, "b": b}), a * b)
    close(run(ops.Mul(va, value("b", 1), out), {"a": a, "b": one}), a * one)
    heads = ops.Mul(va, value("b", 2), out)
    close(run(heads, {"a": a, "b": b[:, :2]}), a * np.repeat(b[:, :2], 3, axis=1))
    close(run(ops.Scale(va, out, 0.3), {"a": a}), a * 0.3)
    close(run(ops.SoftCap(va, out, 2.0), {"a": a}), 2 * np.tanh(a / 2))
    close(run(ops.Clip(va, out, 0.7), {"a": a}), np.clip(a, -0.7, 0.7))


def test_embedding():
    table, ids = rng().normal(size=(9, 4)), np.array([8, 0, 3])
    op = ops.Embedding(value("y", 4), weight("e", 9, 4), value("ids", 1, "int"), 1.5)
    close(run(op, {"ids": ids}, {"e": table}), table[ids] * 1.5)
    op = ops.Embedding(value("y", 4), weight("e", 9, 4), by_position=True, offset=2)
    close(run(op, {"ids": ids}, {"e": table}, batch_of(3, [0, 6, 1])), table[[2, 8, 3]])


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("num_heads", "head_width", "rotary_dim", "rotary_start"),
    [(1, 8, 8, 0), (3, 10, 6, 4), (2, 7, 2, 0)],
)
def test_rope(style, num_heads, head_width, rotary_dim, rotary_start):
    """A rope turns pairs as complex numbers are turned by exp(i * angle)."""
    positions = [0, 5, 1000, 3]
    x = rng().normal(size=(4, num_heads * head_width))
    inv_freq = rng(1).random(rotary_dim // 2)
    table = ops.RopeTable(tuple(inv_freq), 1.25)
    op = ops.Rope(
        value("x", x.shape[1]),
        value("y", x.shape[1]),
        num_heads,
        head_width,
        rotary_dim,
        rotary_start,
        table,
        style,
    )
    heads = x.reshape(4, num_heads, head_width).copy()
    part = heads[:, :, rotary_start : rotary_start + rotary_dim]
    half = rotary_dim // 2
    real, imag = (
        (part[..., :half], part[..., half:])
        if style == "half"
        else (part[..., ::2], part[..., 1::2])
    )
    turned = (real + 1j * imag) * 1.25 * np.exp(1j * np.outer(positions, inv_freq))[:, None]
    order = [turned.real, turned.imag]
    heads[:, :, rotary_start : rotary_start + rotary_dim] = (
        np.concatenate(order, -1) if style == "half" else np.stack(order, -1).reshape(part.shape)
    )
    close(run(op, {"x": x}, batch=batch_of(4, positions)), heads.reshape(x.shape))


def route_op(num_experts, top_k, **options):
    outs = (Value("rows", "expert_rows", 3), value("ids", top_k, "int"), value("weights", top_k))
    return expert_ops.Route(
        value("x", 3), value("z", num_experts), outs, num_experts, top_k, **options
    )


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_top_k"])
@pytest.mark.parametrize("normalize", [True, False])
def test_route(score, normalize):
    x, z = rng().normal(size=(5, 3)), rng(1).normal(size=(5, 7))
    rows, ids, weights = run(
        route_op(7, 3, score=score, normalize=normalize, scale=2.5), {"x": x, "z": z}
    )
    tz = torch.tensor(z)
    scores = {"softmax": tz.softmax(-1), "sigmoid": tz.sigmoid(), "softmax_top_k": tz}[score]
    best, wanted_ids = scores.topk(3)
    if score == "softmax_top_k":
        best = best.softmax(-1)
    if normalize:
        best = best / best.sum(-1, keepdim=True)
    np.testing.assert_array_equal(ids, wanted_ids)
    close(weights, best * 2.5)
    np.testing.assert_array_equal(rows, x[np.arange(15) // 3])


def test_route_chooses_by_bias_within_the_best_groups():
    """A route chooses by bias within the best groups: biases lift group 1 (two good) over group 0
    (one best); the weights are without biases.
    """
    z = np.log(
        np.array([[0.9, 0.1, 0.1, 0.5, 0.5, 0.2]])
        / (1 - np.array([[0.9, 0.1, 0.1, 0.5, 0.5, 0.2]]))
    )
    bias = np.array([0.0, 0, 0, 0.1, 0.2, 0])
    op = route_op(6, 2, score="sigmoid", bias=weight("b", 6), num_groups=2, top_groups=1)
    _, ids, weights = run(op, {"x": np.zeros((1, 3)), "z": z}, {"b": bias})
    assert ids.tolist() == [[4, 3]]
    close(weights, [[0.5, 0.5]])


def test_route_ranks_groups_by_their_best_where_asked():
    z = np.array([[4.0, 0, 0, 3, 3, 0]])
    op = route_op(6, 2, num_groups=2, top_groups=1, group_rank="best")
    assert run(op, {"x": np.zeros((1, 3)), "z": z})[1].tolist() == [[0, 1]]


def test_route_weighs_experts_among_those_that_come_near():
    """A route of margin 0.5 weighs 4 beside 3, which is near, and 3 alone, since 1 is far; each of
    several equals shares with those left.
    """
    z = np.array([[1.0, 4, 3, -1], [0, 0, 0, 0]])
    _, ids, weights = run(
        route_op(4, 2, score="sparsemixer", jitter=0.25), {"x": np.zeros((2, 3)), "z": z}
    )
    assert ids.tolist() == [[1, 2], [0, 1]]
    close(weights, [[1 / (1 + np.exp(-1)), 1], [1 / 4, 1 / 3]])


def test_route_takes_the_lower_of_equals():
    _, ids, _ = run(route_op(5, 3), {"x": np.zeros((1, 3)), "z": np.array([[1.0, 2, 2, 1, 2]])})
    assert ids.tolist() == [[1, 2, 4]]


def test_grouped_linear_and_combine():
    x, ids = rng().normal(size=(6, 4)), np.array([[2, 0], [1, 1], [0, 2]], np.int32)
    w, c, p = rng(1).normal(size=(3, 5, 4)), rng(2).normal(size=(3, 5)), rng(3).random((3, 2))
    rows = Value("x", "expert_rows", 4)
    op = expert_ops.GroupedLinear(
        rows,
        value("ids", 2, "int"),
        Value("y", "expert_rows", 5),
        weight("w", 3, 5, 4),
        weight("c", 3, 5),
    )
    y = run(op, {"x": x, "ids": ids}, {"w": w, "c": c})
    close(y, np.einsum("ri,roi->ro", x, w[ids.reshape(-1)]) + c[ids.reshape(-1)])
    op = expert_ops.Combine(Value("y", "expert_rows", 5), value("p", 2), value("o", 5))
    close(run(op, {"y": y, "p": p}), (y.reshape(3, 2, 5) * p[:, :, None]).sum(1))


def test_rows_chosen():
    x = rng().normal(size=(6, 2))
    batch = batch_of(6)
    batch.sample_rows = np.array([5, 0, 5], np.int32)
    batch.query_starts = np.array([0, 2, 5, 5], np.int32)
    np.testing.assert_array_equal(
        run(ops.GatherRows(value("x", 2), Value("y", "samples", 2)), {"x": x}, batch=batch),
        x[[5, 0, 5]],
    )
    for mode, wanted in {
        "last": x[[1, 4]],
        "cls": x[[0, 2]],
        "mean": [x[:2].mean(0), x[2:5].mean(0)],
    }.items():
        pooled = run(
            ops.PoolRows(value("x", 2), Value("y", "requests", 2), mode), {"x": x}, batch=batch
        )
        close(pooled[:2], wanted)
        assert (pooled[2] == 0).all(), "a padded request"
