"""Identifies how a router chooses experts, by testing each rule of `Route` on random logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from octavo.derive.formulas import are_equal, evaluate
from octavo.program.expert_ops import GroupRank, Route, Score
from octavo.program.program import Value, Weight

Router = Callable[[Any, Any], tuple[Any, Any]]
"""Returns ids and weights, `[T, k]`, for logits `[T, E]` and the bias, if there is one."""

SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "softmax_top_k", "sigmoid_top_k")
"""Score functions that are tested; expert groups are tested only with the first two."""


def find_route(
    router: Router, num_tokens: int, num_experts: int, *, bias: str | None, counts: Sequence[int]
) -> Route | None:
    """Returns a router's rule as a Route with placeholder Values; None if no rule matches. The
    Route's bias is named after the parameter `bias`. `counts` are the config's integers, which may
    include the numbers of groups.
    """
    generator = torch.Generator().manual_seed(0)
    cases = []
    for spread in (0.3, 1.0, 4.0):
        for _ in range(3):
            logits = torch.randn(num_tokens, num_experts, generator=generator).double() * spread
            values = torch.rand(num_experts, generator=generator).double() * 0.3
            cases.append((logits, values, *router(logits, values)))
    for route in _routes(num_experts, cases[0][2].shape[-1], bias, counts):
        scale = _match(route, cases)
        if scale is not None:
            return replace(route, scale=scale)
    return None


def _routes(
    num_experts: int, top_k: int, bias: str | None, counts: Sequence[int]
) -> Iterator[Route]:
    """Yields every rule; rules without groups come first."""
    plain = Route(
        x=Value("x", "tokens", 1),
        logits=Value("logits", "tokens", num_experts),
        outs=(
            Value("rows", "expert_rows", 1),
            Value("ids", "tokens", top_k, "int"),
            Value("weights", "tokens", top_k),
        ),
        num_experts=num_experts,
        top_k=top_k,
        bias=None if bias is None else Weight(bias, (num_experts,)),
    )
    for score in SCORES:
        for normalize in (False, True):
            yield replace(plain, score=score, normalize=normalize)
    ranks: tuple[GroupRank, ...] = ("two_best", "best")
    for groups in sorted({n for n in counts if 1 < n <= num_experts and num_experts % n == 0}):
        for top in sorted({n for n in counts if 1 <= n < groups}):
            if top * (num_experts // groups) < top_k:
                continue
            for score in SCORES[:2]:
                for normalize in (False, True):
                    for rank in ranks:
                        yield replace(
                            plain,
                            score=score,
                            normalize=normalize,
                            num_groups=groups,
                            top_groups=top,
                            group_rank=rank,
                        )


def _match(route: Route, cases: Sequence[Any]) -> float | None:
    """Returns the scale with which a rule reproduces the weights of all cases; None if it does
    not.
    """
    scale: float | None = None
    for logits, values, ids, weights in cases:
        inputs = {route.x: torch.zeros(len(logits), 1).double(), route.logits: logits}
        biases = {} if route.bias is None else {route.bias: values}
        _, expected_ids, expected = evaluate(route, inputs, biases)
        if not torch.equal(ids.sort(-1).values, expected_ids.long().sort(-1).values):
            return None
        got = torch.zeros_like(logits).scatter(1, ids, weights)
        want = torch.zeros_like(logits).scatter(1, expected_ids.long(), expected)
        if scale is None:
            scale = round(float(got.sum() / want.sum()), 9)
        if not are_equal(got, want * scale):
            return None
    return scale
