"""An executor that computes nothing: a step takes as long as a table says, on a clock of its own.
Implements `ports.Executor`.

For whatever asks how the scheduler would fare: tests of starvation and fairness, comparisons of
policies, what-if questions about a machine. Its tokens mean nothing. The real scheduler drives it,
through the real EngineCore with `SimulatedClock` as its clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator
from dataclasses import dataclass

from octavo.engine.protocol.draft_tree import DraftTree
from octavo.engine.protocol.step import (
    AdapterLoaded,
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
"""Id of the token that every row yields."""


LIKELY = TokenLogprobs(
    [TOKEN, *range(TOKEN, TOKEN + 64)], [-1.0, *(-1.0 - i for i in range(64))], [1, *range(1, 65)]
)
"""Logprobs that a beam search chooses from."""


@dataclass(slots=True)
class SimulatedClock:
    """A clock in seconds that only the executor moves on."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class SimulatedCosts:
    """The time that a step takes."""

    table: tuple[tuple[int, float], ...] = SMOLLM2_ON_2_CORES
    """(tokens in the step, seconds), ascending; straight lines between its points, and beyond the
    last as before it.
    """
    context_token_s: float = 1e-6
    """Seconds for each earlier token that a row attends to."""
    move_s: float = 1e-4
    """Seconds for each block copied, out to the host or in again."""

    def compute_s(self, num_tokens: int) -> float:
        if num_tokens <= self.table[0][0]:
            return self.table[0][1]
        index = min(bisect_right(self.table, (num_tokens, 0.0)), len(self.table) - 1)
        (low, low_s), (high, high_s) = self.table[index - 1], self.table[index]
        return low_s + (high_s - low_s) * (num_tokens - low) / (high - low)


class SimulatedExecutor:
    """An executor whose steps only move the clock on."""

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
        """Constant: a step takes no time in which it could hang."""
        return 0

    def compute_s(self, rows: list[ScheduledRequest]) -> float:
        """Returns the seconds that a step of these rows takes."""
        if not rows:
            return 0.0
        num_tokens = num_context = 0
        for row in rows:
            num_tokens += row.num_tokens
            num_context += row.start
        return self.costs.compute_s(num_tokens) + self.costs.context_token_s * num_context

    def close(self) -> None:
        """Does nothing: nothing is held."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step on its way through simulated stages. Implements `ports.Launched`."""

    made: StepResult
    end: float
    """When the last stage has computed it."""
    clock: SimulatedClock

    def result(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.end)
        return self.made


class SimulatedPipeline:
    """An executor of equal stages, each of which computes one step at a time. Implements
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
        """`whole` is the executor, on a clock of its own, whose steps the stages share out; by
        default one of these costs.
        """
        self.clock = clock
        self._whole = whole or SimulatedExecutor(SimulatedClock(), costs)
        self._free = [0.0] * num_stages
        """When each stage has computed all that it was given."""

    def launch(self, plan: StepPlan) -> SimulatedStep:
        made = self._whole.execute(plan)
        end = self.clock.now
        for stage, free in enumerate(self._free):
            end = max(end, free) + made.busy_s / len(self._free)
            self._free[stage] = end
        return SimulatedStep(made, end, self.clock)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @property
    def progress(self) -> int:
        """Constant: a step takes no time in which it could hang."""
        return 0

    def close(self) -> None:
        """Does nothing: nothing is held."""


def _result(row: ScheduledRequest) -> RowResult:
    if row.wants != "draw":
        return RowResult(row.request_id, num_kept=row.num_tokens)
    logprobs = [LIKELY] if row.search_of else None
    tree = DraftTree.of(len(row.draft_ids), row.draft_parents)
    held = tree.held(row.draft_ids, [TOKEN] * len(row.draft_ids))
    return RowResult(
        row.request_id,
        [TOKEN] * (len(held) + 1),
        logprobs,
        num_kept=row.num_tokens - len(row.draft_ids) + len(held),
        kept_path=tree.path_of(held[-1]) if held else 0,
    )
