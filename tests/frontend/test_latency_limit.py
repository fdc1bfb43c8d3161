"""Early rejection: beyond capacity, requests that are taken are in time; below it, none is lost."""

import math

import pytest

from benchmarks.early_rejection import arrivals, everything, limited, run
from octavo.api.errors import Overloaded
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.protocol.outputs import EngineOutput
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.protocol.step_costs import CostPoint, StepCosts
from octavo.frontend.input_processor import ParentRequest
from octavo.frontend.latency_limit import LatencyLimit
from tests.support.engine_fakes import make_request

LIMIT_S = 2.0
COSTS = StepCosts((CostPoint(1, 0, 0.01), CostPoint(8, 0, 0.02), CostPoint(64, 0, 0.1)))


@pytest.fixture(scope="module", params=[(200, 60, 32), (600, 20, 32)], ids=["rows", "prompts"])
def shape(request):
    """Medians of prompt and answer, most requests at once, and the capacity that they have."""
    at_once = arrivals(1, 150, math.inf, *request.param[:2])
    return (*request.param, 150 / run(at_once, request.param[2], everything).clock.now)


def goodput(sim, coming):
    in_time = [one.time_to_first_token <= LIMIT_S for one in sim.records.values()]
    return sum(in_time) / coming[-1].at_s


def test_beyond_capacity_the_engine_does_nearly_what_it_can(shape):
    prompt, output, most, capacity = shape
    coming = arrivals(2, 250, 1.5 * capacity, prompt, output)
    admits, limit = limited(most, LIMIT_S)
    with_limit = goodput(run(coming, most, admits, limit), coming)
    assert with_limit > 0.9 * capacity
    assert with_limit > 2 * goodput(run(coming, most, everything), coming)


def test_below_capacity_hardly_any_request_is_refused(shape):
    prompt, output, most, capacity = shape
    coming = arrivals(3, 150, 0.4 * capacity, prompt, output)
    admits, limit = limited(most, LIMIT_S)
    assert len(run(coming, most, admits, limit).records) > 0.95 * len(coming)


def limit_of(**options):
    return LatencyLimit(SchedulerOptions(max_num_batched_tokens=64, max_num_seqs=2, **options))


def sent(limit, name, num_tokens, now=0.0):
    sample = make_request(name, list(range(num_tokens)))
    request = ParentRequest(name, None, sample.prompt_token_ids, sample.params, [sample], now)
    limit.sent(request, now)


def refused(limit, *arguments):
    with pytest.raises(Overloaded) as caught:
        limit.check(*arguments)
    return caught.value


def test_what_waits_is_computed_first():
    limit = limit_of(max_predicted_ttft_s=0.55)
    limit.check(10_000, 1, 0.0)
    limit.update([], EngineStats(), COSTS, 0.0)
    limit.check(256, 1, 0.0)
    sent(limit, "a", 320)
    assert limit.predict(64, 1, 0.0).ttft_s == pytest.approx(0.6, rel=0.1)
    error = refused(limit, 256, 1, 0.0)
    assert error.retry_after_s >= 1
    assert "the first token would take about" in str(error)
    assert "expected at most 0.55 s\nhint: try again later, or raise max_predicted_ttft_s" in str(
        error
    )
    limit.update([EngineOutput("a", [1])], EngineStats(), None, 0.5)
    limit.check(256, 1, 0.5)
    sent(limit, "b", 320, 0.5)
    limit.update([EngineOutput("b", finish_reason="abort")], EngineStats(), None, 0.6)
    limit.check(256, 1, 0.6)


def test_a_place_among_the_running_is_waited_for():
    limit = limit_of(max_predicted_ttft_s=3.0)
    for name in "ab":
        sent(limit, name, 1)
        limit.update([EngineOutput(name, [1])], EngineStats(), COSTS, 0.0)
    limit.update([EngineOutput("a", [1], finish_reason="length")], EngineStats(), None, 4.0)
    sent(limit, "c", 1, 4.0)
    limit.update([EngineOutput("c", [1])], EngineStats(), None, 4.0)
    assert "first token" in str(refused(limit, 1, 1, 4.0)), "an answer takes 4 s, two run"


def test_more_rows_make_slower_tokens():
    limit = limit_of(max_predicted_tpot_s=0.011)
    limit.update([], EngineStats(), COSTS, 0.0)
    limit.check(1, 1, 0.0)
    sent(limit, "a", 1)
    assert "each next token would take about" in str(refused(limit, 1, 1, 0.0))
