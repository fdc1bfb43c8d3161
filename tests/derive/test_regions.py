"""Regions, routers and masks are identified by their values."""

from typing import get_args

import pytest
import torch
from torch.nn import functional
from transformers import masking_utils

from octavo.derive.capture import AttentionMask, identify_mask
from octavo.derive.formulas import evaluate
from octavo.derive.regions import (
    find_activation,
    find_combination,
    find_elementwise,
    find_norm,
    find_rope,
)
from octavo.derive.routers import find_route
from octavo.derive.rows import Columns, rows_of
from octavo.derive.weights import find_pattern
from octavo.program.expert_ops import Route
from octavo.program.ops import (
    Act,
    Activation,
    ActMul,
    Add,
    Clip,
    LayerNorm,
    Mul,
    RmsNorm,
    Scale,
    SoftCap,
)
from octavo.program.program import Value, Weight

X, Y = (Value(name, "tokens", 12) for name in "xy")
OUT = Value("out", "tokens", 12)
COLUMN = Value("y", "tokens", 1)


def elementwise(function):
    return find_elementwise(lambda rows, _: function(rows), X, OUT, 7)


@pytest.mark.parametrize("name", get_args(Activation))
def test_activations_are_told_apart(name):
    x = Value("x", "tokens", 12)
    region = lambda rows, _: evaluate(Act(x, OUT, name), {x: rows})[0]
    assert find_elementwise(region, X, OUT, 7) == Act(X, OUT, name)


def test_activations_of_pytorch_are_found():
    tanh = lambda x: functional.gelu(x, approximate="tanh")
    found = [find_activation(each) for each in (functional.silu, functional.gelu, tanh)]
    assert [each.activation for each in found] == ["silu", "gelu", "gelu_tanh"]
    assert find_activation(functional.elu) is None


@pytest.mark.parametrize(
    "function, op",
    [
        (lambda x: x * 0.37, Scale(X, OUT, 0.37)),
        (lambda x: 30 * torch.tanh(x / 30), SoftCap(X, OUT, 30.0)),
        (lambda x: x.clamp(-5, 5), Clip(X, OUT, 5.0)),
        (lambda x: x * torch.sigmoid(1.702 * x), None),
        (lambda x: x.square(), None),
        (lambda x: x.clamp(-5, 6), None),
        (functional.elu, None),
    ],
)
def test_other_functions_of_one_number(function, op):
    assert elementwise(function) == op


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_is_found_with_its_eps(centered, offset):
    def region(x, parameters):
        if centered:
            x = x - x.mean(-1, keepdim=True)
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 3e-6)
        return scaled * (parameters["w"] + offset)

    weight = Weight("w", (12,))
    expected = (
        LayerNorm(X, OUT, weight, None, 3e-6, offset)
        if centered
        else RmsNorm(X, OUT, weight, 3e-6, offset)
    )
    assert find_norm(region, X, OUT, 12, {"w": (12,)}, [1e-5, 3e-6]) == expected
    assert find_norm(region, X, OUT, 12, {"w": (12,)}, [1e-5]) is None
    assert find_norm(region, X, OUT, 6, {"w": (12,)}, [3e-6]) is None


def test_a_gate_is_found_whichever_argument_it_is():
    assert find_combination(lambda a, b: functional.silu(b) * a, X, Y, OUT, 7) == ActMul(
        Y, X, OUT, "silu"
    )
    assert find_combination(lambda a, b: a + b, X, Y, OUT, 7) == Add(X, Y, OUT)
    assert find_combination(lambda a, b: a * b, X, COLUMN, OUT, 7) == Mul(X, COLUMN, OUT)
    assert find_combination(lambda a, b: a * b + a, X, Y, OUT, 7) is None


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_a_rotation_is_found(style):
    places = torch.arange(7, dtype=torch.float64)[:, None, None]
    angles = places * torch.tensor([0.9, 0.03])
    x = Value("x", "tokens", 24)

    def region(rows, _parameters):
        heads = rows.reshape(7, 2, 12)
        kept, turned = heads[..., 4:], heads[..., :4]
        a, b = turned.unflatten(-1, (2, 2)).unbind(-2 if style == "half" else -1)
        cos, sin = angles.cos() * 1.5, angles.sin() * 1.5
        new = torch.stack((a * cos - b * sin, b * cos + a * sin), -2 if style == "half" else -1)
        return torch.cat((new.flatten(-2), kept), -1).reshape(7, 24)

    found = find_rope(region, x, Value("out", "tokens", 24), 12, 7)
    assert (found.num_heads, found.rotary_start, found.rotary_dim, found.style) == (2, 0, 4, style)
    assert found.table.inv_freq == pytest.approx((0.9, 0.03))
    assert found.table.mscale == pytest.approx(1.5)


RULES = [
    {"score": "softmax"},
    {"score": "softmax_top_k"},
    {"score": "sigmoid", "normalize": True, "scale": 2.5},
    {"score": "sigmoid", "normalize": True, "num_groups": 4, "top_groups": 2, "scale": 1.5},
    {"score": "softmax", "num_groups": 4, "top_groups": 2, "group_rank": "best", "scale": 16.0},
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bias", [None, "bias"])
def test_a_router_is_found(rule, bias):
    outs = (Value("r", "expert_rows", 1), Value("i", "tokens", 3, "int"), Value("w", "tokens", 3))
    x, logits = Value("x", "tokens", 1), Value("logits", "tokens", 16)
    weight = None if bias is None else Weight(bias, (16,))
    route = Route(x, logits, outs, num_experts=16, top_k=3, bias=weight, **rule)

    def choose(op, rows, values):
        inputs = {op.x: torch.zeros(len(rows), 1).double(), op.logits: rows}
        _, ids, weights = evaluate(op, inputs, {op.bias: values} if bias else {})
        return ids.long(), weights

    found = find_route(
        lambda rows, values: choose(route, rows, values), 7, 16, bias=bias, counts=[2, 3, 4, 16]
    )
    rows, values = torch.randn(7, 16).double(), torch.rand(16).double()
    for ours, theirs in zip(choose(found, rows, values), choose(route, rows, values), strict=True):
        assert torch.allclose(ours.double(), theirs.double())
    assert found.scale == pytest.approx(route.scale)


def test_a_router_with_another_rule_is_not_found():
    def router(logits, _bias):
        weights, ids = (logits.softmax(-1) ** 2).topk(2)
        return ids, weights

    assert find_route(router, 7, 8, bias=None, counts=[]) is None


NO_PADDING = torch.zeros(1, dtype=torch.long)


@pytest.mark.parametrize(
    "function, mask",
    [
        (masking_utils.causal_mask_function, AttentionMask("causal")),
        (masking_utils.sliding_window_causal_mask_function(37), AttentionMask("window", 37)),
        (masking_utils.chunked_causal_mask_function(48, NO_PADDING), AttentionMask("chunk", 48)),
        (masking_utils.bidirectional_mask_function, AttentionMask("full")),
        (masking_utils.sliding_window_bidirectional_mask_function(9), None),
        (lambda _b, _h, q, k: (k <= q) & (k % 2 == 0), None),
        (lambda _b, _h, q, k: (k <= q) & ((k > q - 9) | (k < 4)), None),
    ],
)
def test_masks_are_identified(function, mask):
    assert identify_mask(function) == mask


def test_row_maps_follow_moved_elements():
    columns = Columns()
    rows = columns.rows(Value("x", "tokens", 12), (1, 7, 12), 1, 7)
    heads = rows_of(rows.numbers().reshape(1, 7, 3, 4).transpose(1, 2), 7)
    assert heads.shape == (1, 3, 7, 4) and heads.axis == 2
    half = rows_of(heads.numbers()[..., 2:], 7)
    assert columns.sources(half) == [(Value("x", "tokens", 12), [2, 3, 6, 7, 10, 11])]
    assert rows_of(rows.numbers().flip(1), 7) is None


def test_patterns_of_rows():
    assert find_pattern([2, 3, 6, 7, 10, 11]) == (2, 4, 2)
    assert find_pattern([*range(5, 9)]) == (5, 4, 4)
    assert find_pattern([1, 3, 5]) == (1, 2, 1)
    assert find_pattern([3, 2, 1]) is None
