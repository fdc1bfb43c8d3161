"""An executor that computes nothing: a step advances a simulated clock by a tabulated time.
Implements `ports.Executor`.

For scheduler experiments: tests of starvation and fairness, comparisons of policies, predictions
for other machines. Its tokens are meaningless. It is driven by the real scheduler and EngineCore,
with `SimulatedClock` as the clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator
from dataclasses import dataclass

from octavo.engine.protocol.draft_tree import DraftTree
from octavo.engine.protocol.step import (
    AdapterLoaded,
    ResultKind,
    RowResult,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

SMOLLM2_ON_2_CORES = (
    (1, 0.0084),
    (8, 0.020),
    (32, 0.039),
    (128, 0.090),
    (256, 0.150),
    (512, 0.315),
    (2048, 1.36),
)
"""(tokens in the step, seconds): SmolLM2-135M-Instruct in 4 bits, 2 cores of a Xeon with AMX,
November 2026.
"""

TOKEN = 7
"""Id of the token that every sample yields."""


LIKELY = TokenLogprobs(
    [TOKEN, *range(TOKEN, TOKEN + 64)], [-1.0, *(-1.0 - i for i in range(64))], [1, *range(1, 65)]
)
"""Logprobs for beam searches."""


@dataclass(slots=True)
class SimulatedClock:
    """A clock in seconds that only the executor advances."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class SimulatedCosts:
    """Duration of a step."""

    table: tuple[tuple[int, float], ...] = SMOLLM2_ON_2_CORES
    """(tokens in the step, seconds), ascending; interpolated and extrapolated linearly."""
    context_token_s: float = 1e-6
    """Seconds per earlier token that a row attends to."""
    move_s: float = 1e-4
    """Seconds per block copied to or from the host."""

    def compute_s(self, num_tokens: int) -> float:
        if num_tokens <= self.table[0][0]:
            return self.table[0][1]
        index = min(bisect_right(self.table, (num_tokens, 0.0)), len(self.table) - 1)
        (low, low_s), (high, high_s) = self.table[index - 1], self.table[index]
        return low_s + (high_s - low_s) * (num_tokens - low) / (high - low)


class SimulatedExecutor:
    """An executor whose steps only advance the clock."""

    def __init__(self, clock: SimulatedClock, costs: SimulatedCosts | None = None) -> None:
        self.clock = clock
        self.costs = costs or SimulatedCosts()

    def execute(self, plan: StepPlan) -> StepResult:
        moved_s = self.costs.move_s * len(plan.moves)
        busy_s = moved_s + self.compute_s(plan.rows)
        self.clock.now += busy_s
        compiled = [spec.digest for spec in plan.compiles]
        adapters = [AdapterLoaded(load.ref.digest) for load in plan.adapters]
        return StepResult(
            plan.step,
            [_result(row) for row in plan.rows],
            busy_s,
            moved_s,
            compiled=compiled,
            adapters=adapters,
        )

    def decode(self, plan: StepPlan) -> Generator[StepResult]:
        yield self.execute(plan)
        for _ in range(plan.num_steps - 1):
            busy_s = self.compute_s(plan.rows)
            self.clock.now += busy_s
            yield StepResult(plan.step, [_result(row) for row in plan.rows], busy_s)

    @property
    def progress(self) -> int:
        """Constant: a step takes no real time."""
        return 0

    def compute_s(self, rows: list[ScheduledRequest]) -> float:
        """Returns the seconds of a step of these rows."""
        if not rows:
            return 0.0
        num_tokens = num_context = 0
        for row in rows:
            num_tokens += row.num_tokens
            num_context += row.start
        return self.costs.compute_s(num_tokens) + self.costs.context_token_s * num_context

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step in simulated stages. Implements `ports.Launched`."""

    made: StepResult
    end: float
    """Time at which the last stage finishes the step."""
    clock: SimulatedClock

    def result(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.end)
        return self.made


class SimulatedPipeline:
    """An executor with equal pipeline stages, each of which computes one step at a time. Implements
    `ports.AsyncExecutor`.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        num_stages: int,
        costs: SimulatedCosts | None = None,
        *,
        whole: SimulatedExecutor | None = None,
    ) -> None:
        """`whole`: executor whose steps are divided over the stages, with a separate clock; None:
        one with `costs`.
        """
        self.clock = clock
        self._whole = whole or SimulatedExecutor(SimulatedClock(), costs)
        self._free = [0.0] * num_stages
        """Time at which each stage has finished all its steps."""

    def launch(self, plan: StepPlan) -> SimulatedStep:
        result = self._whole.execute(plan)
        end = self.clock.now
        for stage, free in enumerate(self._free):
            end = max(end, free) + result.busy_s / len(self._free)
            self._free[stage] = end
        return SimulatedStep(result, end, self.clock)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @property
    def progress(self) -> int:
        """Constant: a step takes no real time."""
        return 0

    def close(self) -> None:
        pass


def _result(row: ScheduledRequest) -> RowResult:
    if row.result_kind != ResultKind.SAMPLE:
        return RowResult(row.request_id, num_kept=row.num_tokens)
    logprobs = [LIKELY] if row.search_of else None
    tree = DraftTree.of(len(row.draft_ids), row.draft_parents)
    held = tree.held(row.draft_ids, [TOKEN] * len(row.draft_ids))
    return RowResult(
        row.request_id,
        [TOKEN] * (len(held) + 1),
        logprobs,
        num_kept=row.num_tokens - len(row.draft_ids) + len(held),
        kept_path=tree.get_path_index(held[-1]) if held else 0,
    )
