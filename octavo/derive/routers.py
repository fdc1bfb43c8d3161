"""Identifies how a router chooses experts, by testing each rule of `Route` on random logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.derive.curves import are_equal
from octavo.program.expert_ops import GroupRank, Score

SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "softmax_top_k", "sigmoid_top_k")

Router = Callable[[Any, Any], tuple[Any, Any]]
"""Ids and weights `[T, k]` for logits `[T, E]` and the bias, if there is one."""


@dataclass(frozen=True)
class Rule:
    """The attributes of a Route."""

    score: Score
    normalize: bool
    num_groups: int = 1
    top_groups: int = 1
    group_rank: GroupRank = "best"
    scale: float = 1.0


def find_rule(
    router: Router, num_tokens: int, num_experts: int, *, has_bias: bool, counts: Sequence[int]
) -> Rule | None:
    """Returns the rule of a router; `counts` are the config's integers, of which numbers of groups
    are two.
    """
    generator = torch.Generator().manual_seed(0)
    cases = []
    for spread in (0.3, 1.0, 4.0):
        for _ in range(3):
            logits = torch.randn(num_tokens, num_experts, generator=generator).double() * spread
            bias = torch.rand(num_experts, generator=generator).double() * 0.3
            cases.append((logits, bias, router(logits, bias)))
    top_k = cases[0][2][0].shape[-1]
    for rule in _rules(num_experts, top_k, counts):
        scale = _match(rule, cases, top_k, has_bias=has_bias)
        if scale is not None:
            return Rule(**{**vars(rule), "scale": scale})
    return None


def _rules(num_experts: int, top_k: int, counts: Sequence[int]) -> Iterator[Rule]:
    """Yields every rule, those without groups first."""
    for score in SCORES:
        for normalize in (False, True):
            yield Rule(score, normalize)
    sizes = sorted({n for n in counts if 1 < n <= num_experts and num_experts % n == 0})
    for groups in sizes:
        for top in sorted({n for n in counts if 1 <= n < groups}):
            if top * (num_experts // groups) < top_k:
                continue
            for score in SCORES[:2]:
                for normalize in (False, True):
                    yield Rule(score, normalize, groups, top, "two_best")
                    yield Rule(score, normalize, groups, top, "best")


def _match(rule: Rule, cases: Sequence[Any], top_k: int, *, has_bias: bool) -> float | None:
    """Returns the scale with which a rule gives each case's weights; None if it does not."""
    scale: float | None = None
    for logits, bias, (ids, weights) in cases:
        expected_ids, expected = choose(rule, logits, bias if has_bias else None, top_k)
        got = torch.zeros_like(logits).scatter(1, ids, weights)
        want = torch.zeros_like(logits).scatter(1, expected_ids, expected)
        if not torch.equal(ids.sort(-1).values, expected_ids.sort(-1).values):
            return None
        if scale is None:
            scale = round(float(got.sum() / want.sum()), 9)
        if not are_equal(got, want * scale):
            return None
    return scale


def choose(rule: Rule, logits: Any, bias: Any, top_k: int) -> tuple[Any, Any]:
    """Returns the ids and weights that Route computes, without its scale."""
    if rule.score in ("softmax_top_k", "sigmoid_top_k"):
        values, ids = logits.topk(top_k)
        weights = values.softmax(-1) if rule.score == "softmax_top_k" else values.sigmoid()
    else:
        scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
        ranked = scores if bias is None else scores + bias
        if rule.num_groups > 1:
            ranked = _within_groups(rule, ranked)
        ids = ranked.topk(top_k).indices
        weights = scores.gather(1, ids)
    if rule.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights


def _within_groups(rule: Rule, ranked: Any) -> Any:
    grouped = ranked.reshape(len(ranked), rule.num_groups, -1)
    count = 2 if rule.group_rank == "two_best" else 1
    ranks = grouped.topk(min(count, grouped.shape[-1])).values.sum(-1)
    best = ranks.topk(rule.top_groups).indices
    kept = torch.zeros_like(ranks, dtype=torch.bool).scatter(1, best, value=True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).reshape(ranked.shape)
