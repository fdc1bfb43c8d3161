"""Measured step costs: seconds by the number of tokens computed, a cost for each key read, and the
rate at which blocks are swapped.

Steps that verify draft tokens are measured separately, since they sample after each token. The
core, which has the clock, owns the meter and passes the costs to the scheduler with each call. A
recording contains these costs, so that it replays exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import NamedTuple

import msgspec

from octavo.engine.protocol.step import ResultKind, StepPlan, StepResult

KIND, NUM_TOKENS = attrgetter("kind"), attrgetter("num_tokens")
MAX_SINGLE_TOKENS = 16
"""Up to this number of tokens, each number has a separate point; above it, one point covers a range
up to the next power of two.
"""

WEIGHT = 0.2
"""Weight of the newest step in a point's running mean."""

MOST_SLOWER = 2.0
"""Upper bound on a measured step, as a multiple of its point's mean: a single delay of a second
would make all other sizes look cheap. A machine that stays slower is followed within a few steps.
"""

KEY_WEIGHT = 1 / 64
"""Weight of the newest step in the fit of the cost per key. It is small because a request's context
grows by one key per step: over a few steps, the noise is far larger than the cost of these keys.
"""


class CostPoint(msgspec.Struct, frozen=True, array_like=True):
    """Running means over steps with about the same number of tokens."""

    num_tokens: float
    num_keys: float
    seconds: float
    """Wall clock time of one step in seconds, including Python overhead and reading keys, but not
    swapping blocks.
    """


class StepCosts(msgspec.Struct, frozen=True):
    """Estimates the time of any step; overestimates if nothing similar was measured."""

    points: tuple[CostPoint, ...] = ()
    """Points in ascending order of `num_tokens`."""
    key_s: float = 0.0
    """Seconds per key that the step's rows read."""
    swap_blocks_per_s: float | None = None
    """Blocks of any group moved per second, in either direction; None before the first
    measurement.
    """
    verifying: tuple[CostPoint, ...] = ()
    """Points of steps that only verify draft tokens, in ascending order of `num_tokens`."""

    def step_s(self, num_tokens: int, num_keys: int) -> float | None:
        """Returns the seconds of one step of `num_tokens` tokens whose rows read `num_keys` keys in
        total. Returns None before any step was measured.
        """
        if not self.points:
            return None
        return self._tokens_s(self.points, num_tokens) + self.key_s * num_keys

    def verify_s(self, num_tokens: int, num_keys: int) -> float | None:
        """Returns the seconds of one step of `num_tokens` tokens that verifies draft tokens.
        Returns None before a verifying step of similar size was measured.
        """
        if not _has_size(self.verifying, num_tokens):
            return None
        return self._tokens_s(self.verifying, num_tokens) + self.key_s * num_keys

    def is_measured(self, num_tokens: int) -> bool:
        """Returns whether non-verifying steps with a similar number of tokens were measured."""
        return _has_size(self.points, num_tokens)

    def prefill_s(self, num_tokens: int, max_chunk: int) -> float | None:
        """Returns the seconds for computing a prompt of `num_tokens` alone, in chunks of at most
        `max_chunk`. Returns None before any step was measured.
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
        """Returns the seconds of a step without reading keys. Interpolates between two points;
        returns the first point's time for smaller steps, and scales the last point's time for
        larger ones.
        """
        index = bisect_left(points, num_tokens, key=NUM_TOKENS)
        if index == len(points):
            last = points[-1]
            return self._without_keys_s(last) * num_tokens / last.num_tokens
        high = points[index]
        high_s = self._without_keys_s(high)
        if index == 0 or high.num_tokens == num_tokens:
            return high_s
        low = points[index - 1]
        low_s = self._without_keys_s(low)
        fraction = (num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
        return low_s + (high_s - low_s) * fraction

    def _without_keys_s(self, point: CostPoint) -> float:
        return max(0.0, point.seconds - self.key_s * point.num_keys)


UNMEASURED = StepCosts()


class StepKind(NamedTuple):
    """Key of the steps that are averaged in one point."""

    bucket: int
    verifies: bool


class KeyMeans(NamedTuple):
    """Running means over the steps of one kind, for fitting the cost per key."""

    num_keys: float
    seconds: float
    num_steps: int


class StepCostMeter:
    """Measures step costs as running means. `known`: costs measured earlier."""

    def __init__(self, known: StepCosts = UNMEASURED) -> None:
        self._costs: StepCosts | None = known
        """None if a step was observed after `costs` was last read."""
        self._swap_blocks_per_s = known.swap_blocks_per_s
        self._points = {
            StepKind(_bucket(round(point.num_tokens)), verifies): point
            for verifies, points in ((False, known.points), (True, known.verifying))
            for point in points
        }
        self._key_s = known.key_s
        self._key_means: dict[StepKind, KeyMeans] = {}
        self._key_variance = self._key_covariance = 0.0
        self._num_fitted = 0

    def observe(self, plan: StepPlan, result: StepResult, elapsed_s: float) -> None:
        """Adds a step that took `elapsed_s` seconds of wall clock time, including Python
        overhead.
        """
        self._costs = None
        if result.moved_s > 0 and set(map(KIND, plan.moves)) - {"copy"}:
            old, new = self._swap_blocks_per_s, len(plan.moves) / result.moved_s
            self._swap_blocks_per_s = new if old is None else old + WEIGHT * (new - old)
        step_s = elapsed_s - result.moved_s
        num_tokens = num_keys = num_drafts = 0
        samples_each_token, proposes = True, False
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            if row_result.failure is not None:
                return  # the step may have been recomputed row by row
            num_tokens += row.num_tokens + row.num_encoded
            num_keys += row.start + row.num_tokens
            num_drafts += len(row.draft_ids)
            proposes |= row.propose > 0
            if row.result_kind != ResultKind.SAMPLE or row.num_tokens != len(row.draft_ids) + 1:
                samples_each_token = False
        # A step that only requests drafts takes longer than others with the same number of tokens.
        if plan.rows and step_s > 0 and not (proposes and not num_drafts):
            kind = StepKind(_bucket(num_tokens), num_drafts > 0 and samples_each_token)
            self._observe_step(kind, CostPoint(num_tokens, num_keys, step_s))

    def repeat(self, plan: StepPlan, num_steps: int, elapsed_s: float) -> None:
        """Adds the decode steps of a plan after its first, which took `elapsed_s` in total. They
        have the same weight as if they were added one by one.
        """
        if num_steps == 0 or elapsed_s <= 0:
            return
        num_rows = len(plan.rows)
        num_keys = num_rows * (1 - (num_steps - 1) / 2)
        for row in plan.rows:
            num_keys += row.start
        point = CostPoint(num_rows, num_keys, elapsed_s / num_steps)
        self._observe_step(StepKind(_bucket(num_rows), verifies=False), point, num_steps)
        self._costs = None

    @property
    def costs(self) -> StepCosts:
        """Step costs as measured so far."""
        if self._costs is None:
            points: tuple[list[CostPoint], list[CostPoint]] = ([], [])
            for kind in sorted(self._points):
                points[kind.verifies].append(self._points[kind])
            self._costs = StepCosts(
                tuple(points[False]), self._key_s, self._swap_blocks_per_s, tuple(points[True])
            )
        return self._costs

    def _observe_step(self, kind: StepKind, new: CostPoint, num_steps: int = 1) -> None:
        """Adds the mean of `num_steps` steps to their point."""
        old = self._points.get(kind) or new
        seconds = min(new.seconds, MOST_SLOWER * old.seconds)
        # Larger steps of a bucket also differ in their tokens, which would distort the key cost.
        if new.num_tokens <= MAX_SINGLE_TOKENS:
            self._fit_key_cost(kind, new.num_keys, seconds)
        weight = 1 - (1 - WEIGHT) ** num_steps
        self._points[kind] = CostPoint(
            old.num_tokens + weight * (new.num_tokens - old.num_tokens),
            old.num_keys + weight * (new.num_keys - old.num_keys),
            old.seconds + weight * (seconds - old.seconds),
        )

    def _fit_key_cost(self, kind: StepKind, num_keys: float, step_s: float) -> None:
        """Fits the cost per key by least squares over steps with equal numbers of tokens: the extra
        time of steps that read more keys than the mean. A negative cost is noise and counts as
        zero.
        """
        means = self._key_means.get(kind) or KeyMeans(num_keys, step_s, 0)
        more_keys, more_s = num_keys - means.num_keys, step_s - means.seconds
        num_seen = means.num_steps + 1
        weight = max(KEY_WEIGHT, 1 / num_seen)
        self._key_means[kind] = KeyMeans(
            means.num_keys + weight * more_keys, means.seconds + weight * more_s, num_seen
        )
        self._num_fitted += 1
        weight = max(KEY_WEIGHT, 1 / self._num_fitted)
        self._key_variance += weight * (more_keys * more_keys - self._key_variance)
        self._key_covariance += weight * (more_keys * more_s - self._key_covariance)
        if self._key_variance > 0:
            self._key_s = max(0.0, self._key_covariance / self._key_variance)


def _bucket(num_tokens: int) -> int:
    """Returns the bucket of a step of `num_tokens` tokens: the number itself, or the next power of
    two.
    """
    return num_tokens if num_tokens <= MAX_SINGLE_TOKENS else 1 << (num_tokens - 1).bit_length()


def _has_size(points: tuple[CostPoint, ...], num_tokens: int) -> bool:
    bucket = _bucket(num_tokens)
    return any(_bucket(round(point.num_tokens)) == bucket for point in points)
