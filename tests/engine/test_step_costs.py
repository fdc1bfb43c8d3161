"""What steps cost, measured on simulated ones: each estimate against the machine it came from."""

import random

import pytest

from octavo.engine.protocol.kv_messages import BlockMove
from octavo.engine.protocol.step import (
    ResultKind,
    RowResult,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from octavo.engine.protocol.step_costs import UNMEASURED, CostPoint, StepCostMeter, StepCosts
from octavo.worker.simulated import SimulatedClock, SimulatedCosts, SimulatedExecutor
from tests.support.engine_fakes import make_core, make_request, run_all

KEY_S = 2e-6


def plan_of(*rows: tuple[int, int], moves: tuple[BlockMove, ...] = ()) -> StepPlan:
    """Returns a plan of rows given as (first token, tokens)."""
    scheduled = [ScheduledRequest(str(i), start, num, []) for i, (start, num) in enumerate(rows)]
    return StepPlan(0, [], [], list(moves), scheduled)


def result_of(plan: StepPlan, **fields) -> StepResult:
    rows = [RowResult(row.request_id) for row in plan.rows]
    return StepResult(plan.step, rows, **{"busy_s": 0.001} | fields)


def observe(meter: StepCostMeter, elapsed_s: float, *rows: tuple[int, int], **fields) -> None:
    plan = plan_of(*rows)
    meter.observe(plan, result_of(plan, **fields), elapsed_s)


def test_a_point_is_the_mean_of_what_its_steps_took():
    """A point is the mean of its steps; a step's tokens count alike in one row or in several."""
    meter = StepCostMeter()
    observe(meter, 0.5, (0, 4))
    assert meter.costs.points == (CostPoint(4, 4, 0.5),)
    observe(meter, 1.0, (0, 1), (0, 1), (0, 1), (0, 1))
    assert meter.costs.points == (CostPoint(4, 4, pytest.approx(0.6)),)


def test_sixteen_counts_stand_singly_then_powers_of_two():
    """Each count up to 16 tokens has its own point; more share one up to the next power of two."""
    meter = StepCostMeter()
    for num_tokens in (1, 15, 16, 17, 32, 33, 64, 65):
        observe(meter, 0.1, (0, num_tokens))
    tokens = [point.num_tokens for point in meter.costs.points]
    assert tokens == pytest.approx([1, 15, 16, 17 + 0.2 * 15, 33 + 0.2 * 31, 65])


def test_decode_steps_of_a_plan_weigh_as_they_would_one_by_one():
    """The steps after the first are taken in together, by their mean, with the keys of the mean."""
    one_by_one, together = StepCostMeter(), StepCostMeter()
    for meter in (one_by_one, together):
        observe(meter, 0.1, (9, 1), (9, 1))
    for at in range(4):
        observe(one_by_one, 0.15, (10 + at, 1), (10 + at, 1))
    # `start` is that of the last step.
    together.repeat(plan_of((13, 1), (13, 1)), 4, 4 * 0.15)
    assert together.costs.points[0].seconds == pytest.approx(one_by_one.costs.points[0].seconds)
    alone = StepCostMeter()
    alone.repeat(plan_of((16, 1), (26, 1)), 8, 0.8)
    assert alone.costs.points == (CostPoint(2, 10 + 20 + 7, 0.1),)


def test_a_step_that_was_held_up_hardly_counts_and_a_slower_machine_is_followed():
    """No single step raises a point by more than a fifth; some steps in a row do."""
    meter = StepCostMeter()
    for _ in range(5):
        observe(meter, 0.01, (9, 1))
    observe(meter, 3.0, (9, 1))
    assert meter.costs.step_s(1, 10) == pytest.approx(0.012)
    for _ in range(20):
        observe(meter, 0.05, (9, 1))
    assert meter.costs.step_s(1, 10) == pytest.approx(0.05, rel=0.05)


def test_swapped_blocks_are_measured_apart():
    """Copies on the device say nothing of the swap rate, and moves are no part of a step's cost."""
    meter = StepCostMeter()
    for kind in ("copy", "swap_out"):
        assert meter.costs.swap_blocks_per_s is None
        plan = plan_of((0, 1), moves=(BlockMove(0, 1, 2, kind),))
        meter.observe(plan, result_of(plan, moved_s=0.01), 0.11)
    assert meter.costs.swap_blocks_per_s == pytest.approx(100.0)
    assert meter.costs.step_s(1, 0) == pytest.approx(0.1)


def test_steps_in_which_a_row_fails_are_left_out():
    """Steps in which a row fails are not measured, since they may have been computed again row by
    row.
    """
    meter = StepCostMeter()
    plan = plan_of((0, 1))
    result = result_of(plan)
    result.rows[0].failure = "NaN"
    meter.observe(plan, result, 5.0)
    assert meter.costs == UNMEASURED and meter.costs.step_s(1, 1) is None


def test_a_keys_cost_is_found_in_the_noise():
    """The cost of a key is met within 15% over batches of different sizes and contexts with 5%
    noise.
    """
    draw = random.Random(0)
    meter = StepCostMeter()
    for _ in range(40):
        num_rows, context = draw.randint(1, 16), draw.randrange(4000)
        for step in range(30):
            keys = num_rows * (context + step + 1)
            elapsed_s = (0.004 + 0.0005 * num_rows + KEY_S * keys) * draw.gauss(1, 0.05)
            observe(meter, elapsed_s, *[(context + step, 1)] * num_rows)
    assert meter.costs.key_s == pytest.approx(KEY_S, rel=0.15)


def test_estimates_are_bounds_where_nothing_close_was_measured():
    """An estimate is that of the first point below it, on a line between points, and in proportion
    beyond the last.
    """
    costs = StepCosts((CostPoint(4, 0, 0.1), CostPoint(8, 0, 0.3)), key_s=KEY_S)
    assert [costs.step_s(num, 0) for num in (1, 4, 6, 8, 16)] == pytest.approx(
        [0.1, 0.1, 0.2, 0.3, 0.6]
    )
    assert costs.step_s(4, 1000) == pytest.approx(0.1 + 1000 * KEY_S)


def test_a_prefill_is_its_chunks():
    """The cost of a prefill is that of its chunks, each reading the keys of all before it and its
    own.
    """
    costs = StepCosts((CostPoint(4, 0, 0.1), CostPoint(8, 0, 0.3)), key_s=KEY_S)
    assert costs.prefill_s(20, 8) == pytest.approx(0.7 + (8 + 16 + 20) * KEY_S)
    assert UNMEASURED.prefill_s(20, 8) is None


def test_the_core_measures_the_wall_clock():
    """A step costs what passes on the core's clock from its plan to its outputs."""
    clock = SimulatedClock()
    executor = SimulatedExecutor(clock, SimulatedCosts(((1, 0.5), (4, 0.5)), context_token_s=0.0))
    schedule_s = 0.25
    core = make_core(executor=executor, clock=clock)
    schedule = core.scheduler.schedule

    def slow_schedule(now, costs):
        clock.now += schedule_s
        return schedule(now, costs)

    core.scheduler.schedule = slow_schedule
    core.add(make_request("a", [1, 2, 3], max_tokens=4))
    run_all(core)
    assert core.costs.step_s(1, 0) == core.costs.step_s(3, 0) == pytest.approx(0.75)


def verify(meter: StepCostMeter, elapsed_s: float, *guesses: int) -> None:
    """Has the meter see a step of rows that verify guesses, `uses_speculation` numbers of them."""
    rows = [
        ScheduledRequest(str(i), 9, 1 + num, [], result_kind=ResultKind.SAMPLE, draft_ids=[7] * num)
        for i, num in enumerate(guesses)
    ]
    plan = StepPlan(0, [], [], [], rows)
    meter.observe(plan, result_of(plan), elapsed_s)


def test_a_prompts_chunk_does_not_tell_what_verifying_takes():
    """Steps that verify have points of their own, and plain ones theirs; without a step of about
    as many tokens that verified, what it takes is not known.
    """
    meter = StepCostMeter()
    observe(meter, 0.02, (0, 40))
    assert meter.costs.verify_s(40, 0) is None
    verify(meter, 0.05, 3, 35)
    observe(meter, 0.02, (0, 40))
    assert meter.costs.verify_s(40, 0) == pytest.approx(0.05)
    assert meter.costs.step_s(40, 0) == pytest.approx(0.02)
    assert meter.costs.verify_s(8, 0) is None and not meter.costs.is_measured(8)
    again = StepCostMeter(meter.costs)
    observe(again, 0.02, (0, 40))
    assert again.costs.verify_s(40, 0) == pytest.approx(0.05)


def test_a_step_that_verifies_beside_a_prompt_is_no_verifying_step():
    meter = StepCostMeter()
    rows = [
        ScheduledRequest("a", 9, 4, [], result_kind=ResultKind.SAMPLE, draft_ids=[7] * 3),
        ScheduledRequest("b", 0, 36, [], result_kind=ResultKind.SAMPLE),
    ]
    plan = StepPlan(0, [], [], [], rows)
    meter.observe(plan, result_of(plan), 0.03)
    assert not meter.costs.verifying and meter.costs.is_measured(40)
