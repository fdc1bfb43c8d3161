"""Early rejection beyond capacity: requests a second that have their first token in time, without a
limit, with `max_predicted_ttft_s`, and with an oracle.

    python -m benchmarks.early_rejection [--load 1.5] [--requests 400] [--limit 2]

The real scheduler runs over the simulated executor (SmolLM2's step times on 2 cores); prompts and
answers have lognormal lengths, arrivals are Poisson. Capacity is what the engine completes when all
is there at once. The oracle knows every length: it takes a request if and only if a copy of the
engine, run on, gives it its first token in time.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.api.errors import Overloaded
from octavo.config.scheduler_options import SchedulerOptions
from octavo.frontend.input_processor import ParentRequest
from octavo.frontend.latency_limit import LatencyLimit
from tests.support.simulation import Simulation, percentile, request_of, simulation

SHAPES = ((200, 60, 32), (600, 20, 32), (50, 200, 32), (50, 200, 128))
"""Medians of prompt and answer in tokens, and most requests running at once."""
CHUNK = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that will come."""

    name: str
    at_s: float
    num_prompt: int
    num_output: int

    def request(self):
        return request_of(self.name, self.at_s, self.num_prompt, self.num_output)


Admits = Callable[[Simulation, Arrival], bool]


def arrivals(seed: int, count: int, rate: float, prompt: int, output: int) -> list[Arrival]:
    """Draws requests that come at `rate` a second, all at once where it is infinite."""
    draw = random.Random(seed)
    now = 0.0
    made = []
    for index in range(count):
        now += 0.0 if math.isinf(rate) else draw.expovariate(rate)
        lengths = [draw.lognormvariate(math.log(median), 0.8) for median in (prompt, output)]
        num_prompt, num_output = min(1500, max(8, int(lengths[0]))), int(lengths[1])
        made.append(Arrival(f"{seed}-{index}", now, num_prompt, min(600, max(2, num_output))))
    return made


def run(coming: Sequence[Arrival], max_num_seqs: int, admits: Admits, limit=None) -> Simulation:
    """Runs the requests that are admitted to their ends; `limit` is told what happens."""
    sim = simulation(
        num_blocks=100_000, max_model_len=4096, budget=CHUNK, max_num_seqs=max_num_seqs
    )
    index = 0
    while index < len(coming) or sim.core.has_work:
        if not sim.core.has_work:
            sim.clock.now = max(sim.clock.now, coming[index].at_s)
        while index < len(coming) and coming[index].at_s <= sim.clock.now:
            if admits(sim, coming[index]):
                sim.add(coming[index].request())
            index += 1
        step(sim, limit)
    return sim


def step(sim: Simulation, limit: LatencyLimit | None = None) -> None:
    """Computes a step and notes first tokens."""
    pause_s = sim.core.pause_s()
    if pause_s:
        sim.clock.now += pause_s
        return
    made = sim.core.step()
    for output in made.outputs:
        record = sim.records[output.request_id]
        if not record.num_tokens:
            record.first_token_time = sim.clock.now
        record.num_tokens += len(output.token_ids)
    if limit is not None:
        limit.update(made.outputs, made.stats, made.costs, sim.clock.now)


def everything(sim: Simulation, one: Arrival) -> bool:
    return True


def oracle(limit_s: float) -> Admits:
    """Returns what admits a request that a copy of the engine starts in time."""

    def admits(sim: Simulation, one: Arrival) -> bool:
        ahead = copy.deepcopy(sim)
        ahead.add(one.request())
        record = ahead.records[one.name]
        while math.isinf(record.first_token_time) and ahead.clock.now <= one.at_s + limit_s:
            step(ahead)
        return record.time_to_first_token <= limit_s

    return admits


def limited(max_num_seqs: int, limit_s: float) -> tuple[Admits, LatencyLimit]:
    """Returns what admits a request as a server does, and its limit."""
    options = SchedulerOptions(
        max_num_batched_tokens=CHUNK, max_num_seqs=max_num_seqs, max_predicted_ttft_s=limit_s
    )
    limit = LatencyLimit(options)

    def admits(sim: Simulation, one: Arrival) -> bool:
        try:
            limit.check(one.num_prompt, 1, one.at_s)
        except Overloaded:
            return False
        sample = one.request()
        limit.sent(
            ParentRequest(
                one.name, None, sample.prompt_token_ids, sample.params, [sample], one.at_s
            ),
            one.at_s,
        )
        return True

    return admits, limit


def main() -> None:
    """Prints the goodput of each way for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=float, default=1.5)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--limit", type=float, default=2.0)
    given = parser.parse_args()
    for prompt, output, most in SHAPES:
        at_once = arrivals(1, given.requests, math.inf, prompt, output)
        capacity = given.requests / run(at_once, most, everything).clock.now
        coming = arrivals(2, given.requests, given.load * capacity, prompt, output)
        print(f"prompts {prompt}, answers {output}, {most} at once: {capacity:.2f} requests/s")
        admits, limit = limited(most, given.limit)
        for name, way in (
            ("no limit", (everything, None)),
            ("predicted", (admits, limit)),
            ("oracle", (oracle(given.limit), None)),
        ):
            sim = run(coming, most, *way)
            times = [record.time_to_first_token for record in sim.records.values()]
            good = sum(time <= given.limit for time in times)
            print(
                f"  {name:9} goodput {good / coming[-1].at_s:.2f}/s,"
                f" {given.requests - len(times)} of {given.requests} refused,"
                f" time to first token p50 {percentile(times, 50):.2f} s,"
                f" p99 {percentile(times, 99):.2f} s"
            )


if __name__ == "__main__":
    main()
