"""What a step costs on this machine, measured from steps: seconds by the number of tokens computed,
plus a cost for each key read, and how fast blocks are swapped. Steps that verify guesses have
points of their own: they draw after each token, where a prompt's chunk of as many draws once.

The core owns the meter, since it has the clock, and hands the costs to the scheduler with each
call; the scheduler itself measures nothing, and a recording that holds them replays exactly. Knows
plans and results, no request.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from octavo.engine.protocol.step import StepPlan, StepResult

MAX_SINGLE_TOKENS = 16
"""Highest number of tokens with a point of its own; beyond, one point serves up to the next power
of two.
"""

WEIGHT = 0.2
"""Weight of the newest step in the running mean of a point."""

MOST_SLOWER = 2.0
"""Most times a point's mean that one step counts for: one that the machine held up for a second
would make all other sizes look cheap. A machine that is slower from now on is followed in a few
steps.
"""

KEY_WEIGHT = 1 / 64
"""Weight of the newest step in the fit of the cost of a key. It is small, since a request's context
grows by one key a step: within a few steps the noise is far larger than what these keys cost.
"""


class CostPoint(msgspec.Struct, frozen=True, array_like=True):
    """Running means over the steps of about the same number of tokens."""

    num_tokens: float
    num_keys: float
    seconds: float
    """Wall clock of one step, in seconds; Python's share and keys are included, swapped blocks are
    not.
    """


class StepCosts(msgspec.Struct, frozen=True):
    """An estimate of what any step takes; an upper bound where nothing close to it was measured."""

    points: tuple[CostPoint, ...] = ()
    """Ascending by `num_tokens`."""
    key_s: float = 0.0
    """Seconds for each key that a row of the step reads."""
    swap_blocks_per_s: float | None = None
    """Blocks of any group moved per second, in either direction; None until some were."""
    verifying: tuple[CostPoint, ...] = ()
    """Points of steps that verify guesses and compute nothing else, ascending by `num_tokens`."""

    def step_s(self, num_tokens: int, num_keys: int) -> float | None:
        """Returns the seconds of one step of `num_tokens` tokens whose rows read `num_keys` keys
        together; None until a step was measured.
        """
        if not self.points:
            return None
        return self._tokens_s(self.points, num_tokens) + self.key_s * num_keys

    def verify_s(self, num_tokens: int, num_keys: int) -> float | None:
        """Returns the seconds of one step that verifies guesses, of `num_tokens` tokens in all;
        None until one of about as many was measured.
        """
        if not _has_size(self.verifying, num_tokens):
            return None
        return self._tokens_s(self.verifying, num_tokens) + self.key_s * num_keys

    def is_measured(self, num_tokens: int) -> bool:
        """Returns whether steps of about as many tokens were measured that verify nothing."""
        return _has_size(self.points, num_tokens)

    def prefill_s(self, num_tokens: int, max_chunk: int) -> float | None:
        """Returns the seconds of computing a prompt of `num_tokens` alone, in chunks of at most
        `max_chunk`; None until a step was measured.
        """
        seconds = 0.0
        for start in range(0, num_tokens, max_chunk):
            end = min(num_tokens, start + max_chunk)
            step_s = self.step_s(end - start, end)
            if step_s is None:
                return None
            seconds += step_s
        return seconds

    def _tokens_s(self, points: tuple[CostPoint, ...], num_tokens: int) -> float:
        """Returns the seconds of a step that reads no key: on a straight line between two points;
        those of the first point below it, in proportion to the tokens beyond the last.
        """
        index = bisect_left([point.num_tokens for point in points], num_tokens)
        if index == len(points):
            last = points[-1]
            return self._without_keys_s(last) * num_tokens / last.num_tokens
        high = points[index]
        high_s = self._without_keys_s(high)
        if index == 0 or high.num_tokens == num_tokens:
            return high_s
        low = points[index - 1]
        low_s = self._without_keys_s(low)
        share = (num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
        return low_s + (high_s - low_s) * share

    def _without_keys_s(self, point: CostPoint) -> float:
        return max(0.0, point.seconds - self.key_s * point.num_keys)


UNMEASURED = StepCosts()


class StepKind(NamedTuple):
    """Steps that share a point."""

    bucket: int
    verifies: bool


class StepCostMeter:
    """Measures what steps cost, as running means. `known` are costs measured before."""

    def __init__(self, known: StepCosts = UNMEASURED) -> None:
        self._costs: StepCosts | None = known
        """None after a step until `costs` is read."""
        self._swap_blocks_per_s = known.swap_blocks_per_s
        self._points = {
            StepKind(_bucket(round(point.num_tokens)), verifies): point
            for verifies, points in ((False, known.points), (True, known.verifying))
            for point in points
        }
        self._key_fit = KeyCostFit(known.key_s)

    def observe(self, plan: StepPlan, result: StepResult, elapsed_s: float) -> None:
        """Takes in a step that took `elapsed_s` of wall clock, Python's share included."""
        if result.moved_s > 0 and any(move.kind != "copy" for move in plan.moves):
            self._swap_blocks_per_s = _mean(
                self._swap_blocks_per_s, len(plan.moves) / result.moved_s
            )
        step_s = elapsed_s - result.moved_s
        # A step in which a row fails may have been computed again, row by row.
        has_failed = any(row.failure is not None for row in result.rows)
        if plan.rows and step_s > 0 and not (has_failed or _only_proposes(plan)):
            kind = StepKind(_bucket(plan.num_tokens), _only_verifies(plan))
            num_keys = sum(row.start + row.num_tokens for row in plan.rows)
            self._observe_step(kind, CostPoint(plan.num_tokens, num_keys, step_s))
        self._costs = None

    def repeat(self, plan: StepPlan, num_steps: int, elapsed_s: float) -> None:
        """Takes in the decode steps of a plan after its first, in which each row computes a token;
        `elapsed_s` is that of all of them. They weigh as much as they would one by one.
        """
        if num_steps == 0 or elapsed_s <= 0:
            return
        num_rows = len(plan.rows)
        num_keys = sum(row.start for row in plan.rows) + num_rows * (1 - (num_steps - 1) / 2)
        point = CostPoint(num_rows, num_keys, elapsed_s / num_steps)
        self._observe_step(StepKind(_bucket(num_rows), verifies=False), point, num_steps)
        self._costs = None

    @property
    def costs(self) -> StepCosts:
        """Costs of steps as measured so far."""
        if self._costs is None:
            self._costs = StepCosts(
                self._points_of(verifies=False),
                self._key_fit.key_s,
                self._swap_blocks_per_s,
                self._points_of(verifies=True),
            )
        return self._costs

    def _points_of(self, *, verifies: bool) -> tuple[CostPoint, ...]:
        return tuple(
            self._points[kind] for kind in sorted(self._points) if kind.verifies == verifies
        )

    def _observe_step(self, kind: StepKind, new: CostPoint, num_steps: int = 1) -> None:
        """Takes in the mean of `num_steps` steps."""
        old = self._points.get(kind) or new
        seconds = min(new.seconds, MOST_SLOWER * old.seconds)
        # Beyond, steps of one bucket differ in their tokens too: not all of a difference in
        # seconds would be the keys'.
        if new.num_tokens <= MAX_SINGLE_TOKENS:
            self._key_fit.observe(kind, new.num_keys, seconds)
        weight = 1 - (1 - WEIGHT) ** num_steps
        self._points[kind] = CostPoint(
            old.num_tokens + weight * (new.num_tokens - old.num_tokens),
            old.num_keys + weight * (new.num_keys - old.num_keys),
            old.seconds + weight * (seconds - old.seconds),
        )


class KeyCostFit:
    """The cost of a key, by least squares over steps of equally many tokens: what those with more
    keys than their mean take longer than their mean. Newer steps count more.
    """

    def __init__(self, known_s: float = 0.0) -> None:
        self.key_s = known_s
        self._means: dict[StepKind, KeyMeans] = {}
        self._variance = 0.0
        self._covariance = 0.0
        self._num_seen = 0

    def observe(self, kind: StepKind, num_keys: float, step_s: float) -> None:
        """Takes in one step; a cost below zero is noise and is taken for zero."""
        means = self._means.setdefault(kind, KeyMeans(num_keys, step_s))
        more_keys, more_s = means.observe(num_keys, step_s)
        self._num_seen += 1
        weight = max(KEY_WEIGHT, 1 / self._num_seen)
        self._variance += weight * (more_keys * more_keys - self._variance)
        self._covariance += weight * (more_keys * more_s - self._covariance)
        if self._variance > 0:
            self.key_s = max(0.0, self._covariance / self._variance)


@dataclass(slots=True)
class KeyMeans:
    """Running means over steps of equally many tokens."""

    num_keys: float
    seconds: float
    num_seen: int = 0

    def observe(self, num_keys: float, step_s: float) -> tuple[float, float]:
        """Takes in one step; returns by how many keys and seconds it is off the means so far."""
        more_keys, more_s = num_keys - self.num_keys, step_s - self.seconds
        self.num_seen += 1
        weight = max(KEY_WEIGHT, 1 / self.num_seen)
        self.num_keys += weight * more_keys
        self.seconds += weight * more_s
        return more_keys, more_s


def _bucket(num_tokens: int) -> int:
    """Returns which point a step of `num_tokens` belongs to: the number itself, or the next power
    of two.
    """
    return num_tokens if num_tokens <= MAX_SINGLE_TOKENS else 1 << (num_tokens - 1).bit_length()


def _has_size(points: tuple[CostPoint, ...], num_tokens: int) -> bool:
    bucket = _bucket(num_tokens)
    return any(_bucket(round(point.num_tokens)) == bucket for point in points)


def _only_verifies(plan: StepPlan) -> bool:
    """Returns whether a step verifies guesses, and every row draws after each of its tokens."""
    return any(row.draft_ids for row in plan.rows) and all(
        row.wants == "draw" and row.num_tokens == len(row.draft_ids) + 1 for row in plan.rows
    )


def _only_proposes(plan: StepPlan) -> bool:
    """Returns whether a step makes guesses and verifies none: it takes longer than others of as
    many tokens.
    """
    proposes = any(row.propose for row in plan.rows)
    return proposes and not any(row.draft_ids for row in plan.rows)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
