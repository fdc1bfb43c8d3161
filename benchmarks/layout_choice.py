"""Whether the layout that `octavo plan --trace` chooses is within 5% of the best of all.

    python -m benchmarks.layout_choice [--machines 4] [--requests 150] [--parts 2]

Simulated throughout: the costs of steps are those that SmolLM2 was measured to have on two cores.
The choice is that of the command, by the first requests of the trace. Every layout is then rated by
the parts of the trace that follow, with a finer search; the choice's goodput is compared with the
best of these. Prints a JSON line for each objective.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from octavo.cli.traffic import TrafficRequest, prompt_of, read_trace
from octavo.config.cache_options import CacheOptions
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.step_costs import CostPoint, StepCosts
from octavo.wiring import layout_search
from octavo.wiring.layout_search import Objective, goodput, layouts_of
from octavo.wiring.simulated_fleet import (
    FleetLayout,
    FleetOptionsSimulated,
    SimulatedEngine,
    SimulatedRequest,
)

TRACE = Path(__file__).parent / "data" / "mooncake_conversation.jsonl"
OBJECTIVES = ("ttft=1s,tpot=40ms", "ttft=3s,tpot=20ms")
GOAL = 0.95
FINE = 9
"""Halvings of the range of rates in the finer search."""
BLOCK = 16
STEP_MS = {1: 4.0, 4: 7.0, 8: 10.0, 16: 16.0, 64: 44.0, 256: 150.0, 512: 290.0}
"""Milliseconds of steps by their tokens."""


def engine() -> SimulatedEngine:
    """Describes SmolLM2's engine on two cores of an EPYC, with 46 KB of K and V a token."""
    points = tuple(CostPoint(tokens, 0, ms / 1000) for tokens, ms in STEP_MS.items())
    return SimulatedEngine(
        SchedulerOptions(max_num_seqs=32, max_num_batched_tokens=512),
        CacheOptions(),
        [BlockGroup(4096)],
        BLOCK,
        4096,
        StepCosts(points, key_s=2e-7),
        token_bytes=46e3,
    )


Make = Callable[[float], Sequence[SimulatedRequest]]


def requests_of(rows: Sequence[TrafficRequest]) -> Make:
    """Returns a part of the trace at any speed, from its first request on."""
    prompts = [prompt_of(row, 0) for row in rows]
    first_s = rows[0].at_s

    def make(speed: float) -> list[SimulatedRequest]:
        return [
            SimulatedRequest(f"r{at}", (row.at_s - first_s) / speed, prompt, row.output_len)
            for at, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
        ]

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--parts", type=int, default=2)
    args = parser.parse_args()
    count = args.requests
    rows = read_trace(TRACE, scale=Fraction(1, 32), num_requests=count * (1 + args.parts))
    first, *parts = (
        requests_of(rows[start : start + count]) for start in range(0, len(rows), count)
    )
    options, one = FleetOptionsSimulated(link_bytes_per_s=125e6), engine()
    for text in OBJECTIVES:
        objective = Objective.parse(text)

        def rated(layout: FleetLayout, make: Make, limits: Objective = objective) -> float:
            return goodput(one, layout, make, limits, options)

        chosen = max(layouts_of(args.machines), key=lambda layout: rated(layout, first))
        layout_search.NUM_HALVINGS = FINE
        means: dict[str, float] = {}
        for layout in layouts_of(args.machines):
            found = [rated(layout, part) for part in parts]
            means[str(layout)] = sum(found) / len(found)
        layout_search.NUM_HALVINGS = 6
        best = max(means, key=means.__getitem__)
        share = means[str(chosen)] / means[best]
        row = {
            "simulated": True,
            "objective": text,
            "chosen": str(chosen),
            "best": best,
            "share": round(share, 3),
            "goal": GOAL,
            "met": share >= GOAL,
            "requests_per_s": {name: round(rate, 2) for name, rate in means.items()},
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
