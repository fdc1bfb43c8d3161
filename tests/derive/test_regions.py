"""Regions, routers and masks are identified by their values."""

import pytest
import torch
from torch.nn import functional
from transformers import masking_utils

from octavo.derive.capture import AttentionMask, identify_mask
from octavo.derive.curves import FUNCTIONS, Curve, identify_curve
from octavo.derive.regions import NormRegion, find_gate, find_norm, find_rotation
from octavo.derive.routers import Rule, choose, find_rule
from octavo.derive.rows import Columns, rows_of
from octavo.derive.weights import find_pattern
from octavo.program.program import Value

SHAPE = (1, 7, 12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations_are_told_apart(name):
    assert identify_curve(FUNCTIONS[name]) == Curve(activation=name)


@pytest.mark.parametrize(
    "function, curve",
    [
        (lambda x: x * 0.37, Curve(factor=0.37)),
        (lambda x: 30 * torch.tanh(x / 30), Curve(cap=30.0)),
        (lambda x: x.clamp(-5, 5), Curve(limit=5.0)),
        (lambda x: x * torch.sigmoid(1.702 * x), None),
        (lambda x: x.square(), None),
        (lambda x: x.clamp(-5, 6), None),
        (functional.elu, None),
    ],
)
def test_other_functions_of_one_number(function, curve):
    assert identify_curve(function) == curve


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_is_found_with_its_eps(centered, offset):
    def region(x, parameters):
        if centered:
            x = x - x.mean(-1, keepdim=True)
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 3e-6) * (parameters["w"] + offset)
        )

    found = find_norm(region, SHAPE, {"w": (12,)}, [1e-5, 3e-6])
    assert found == NormRegion(3e-6, centered, "w", offset, None)
    assert find_norm(region, SHAPE, {"w": (12,)}, [1e-5]) is None


def test_a_gate_is_found_whichever_argument_it_is():
    assert find_gate(lambda a, b: functional.silu(b) * a, SHAPE, SHAPE) == (
        Curve(activation="silu"),
        True,
    )
    assert find_gate(lambda a, b: a * b, SHAPE, (1, 7, 1)) == (None, False)
    assert find_gate(lambda a, b: a * b + a, SHAPE, SHAPE) is None


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_a_rotation_is_found(style):
    places = torch.arange(7, dtype=torch.float64)[:, None]
    angles = places * torch.tensor([0.9, 0.03])

    def region(x, _parameters):
        kept, turned = x[..., 4:], x[..., :4]
        pairs = turned.unflatten(-1, (2, 2))
        a, b = pairs.unbind(-2 if style == "half" else -1)
        cos, sin = angles.cos() * 1.5, angles.sin() * 1.5
        new = torch.stack((a * cos - b * sin, b * cos + a * sin), -2 if style == "half" else -1)
        return torch.cat((new.flatten(-2), kept), -1)

    found = find_rotation(region, (1, 2, 7, 12), 2)
    assert (found.start, found.width, found.style) == (0, 4, style)
    assert found.inv_freq == pytest.approx((0.9, 0.03)) and found.mscale == pytest.approx(1.5)


RULES = [
    Rule("softmax", False),
    Rule("softmax_top_k", False),
    Rule("sigmoid", True, scale=2.5),
    Rule("sigmoid", True, 4, 2, "two_best", 1.5),
    Rule("softmax", False, 4, 2, "best", 16.0),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_router_is_found(rule, has_bias):
    if has_bias and rule.score == "softmax_top_k":
        return

    def router(logits, bias):
        ids, weights = choose(rule, logits, bias if has_bias else None, 3)
        return ids, weights * rule.scale

    found = find_rule(router, 7, 16, has_bias=has_bias, counts=[2, 3, 4, 16])
    logits = torch.randn(7, 16, dtype=torch.float64)
    bias = torch.rand(16, dtype=torch.float64) if has_bias else None
    for ours, theirs in zip(
        choose(found, logits, bias, 3), choose(rule, logits, bias, 3), strict=True
    ):
        assert torch.allclose(ours.double(), theirs.double())
    assert found.scale == pytest.approx(rule.scale)


def test_a_router_with_another_rule_is_not_found():
    def router(logits, _bias):
        weights, ids = (logits.softmax(-1) ** 2).topk(2)
        return ids, weights

    assert find_rule(router, 7, 8, has_bias=False, counts=[]) is None


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
