"""Whether the layout that `octavo plan --trace` chooses is within 5% of the best of all.

    python -m benchmarks.layout_choice [--machines 4] [--requests 100] [--parts 2]

Simulated throughout: the costs of steps are those that SmolLM2 was measured to have on two cores.
The choice is that of the command, by the first requests of the trace. It is rated twice, each time
beside every layout and with a finer search than the command's: by the requests that it was chosen
by, which asks whether the search finds the best, and by each of the parts of the trace that follow,
which asks whether the choice holds for what comes next. Prints a JSON line for each objective.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from octavo.config.cache_options import CacheOptions
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.protocol.step_costs import CostPoint, StepCosts
from octavo.tools.bench.traffic import TrafficRequest, make_prompt, read_trace, spread_arrivals
from octavo.tools.layout_search import NUM_HALVINGS, Objective, goodput, list_layouts
from octavo.tools.simulated_fleet import (
    FleetOptionsSimulated,
    SimulatedEngine,
    SimulatedRequest,
)

TRACE = Path(__file__).parent / "data" / "mooncake_conversation.jsonl"
OBJECTIVES = ("ttft=1s,tpot=40ms", "ttft=3s,tpot=20ms")
GOAL = 0.95
FINE = 8
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
    prompts = [make_prompt(row, 0) for row in rows]
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
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--parts", type=int, default=2)
    args = parser.parse_args()
    count = args.requests
    total = count * (1 + args.parts)
    rows = spread_arrivals(read_trace(TRACE, scale=Fraction(1, 32), num_requests=total))
    first, *parts = (
        requests_of(rows[start : start + count]) for start in range(0, len(rows), count)
    )
    for text in OBJECTIVES:
        row = {"simulated": True, **judged(text, args.machines, first, parts)}
        print(json.dumps(row), flush=True)


def judged(text: str, num_machines: int, first: Make, parts: Sequence[Make]) -> dict[str, Any]:
    """Chooses a layout by the first requests, and compares it with the best of all."""
    options, one = FleetOptionsSimulated(link_bytes_per_s=125e6), engine()
    objective, layouts = Objective.parse(text), list_layouts(num_machines)

    def rates(make: Make, num_halvings: int) -> dict[str, float]:
        return {
            str(layout): goodput(one, layout, make, objective, options, num_halvings=num_halvings)
            for layout in layouts
        }

    by_command = rates(first, NUM_HALVINGS)
    chosen = max(by_command, key=by_command.__getitem__)
    same, *later = (rates(make, FINE) for make in (first, *parts))
    # No layout keeps to the limits where too many prompts of a part are too long for them alone.
    possible = [found for found in later if max(found.values())]
    shares = [found[chosen] / max(found.values()) for found in possible]
    best = max(same.values())
    if not best:
        return {"objective": text, "goal": GOAL, "impossible": True}
    return {
        "objective": text,
        "goal": GOAL,
        "chosen": chosen,
        "same_requests": round(same[chosen] / best, 3),
        "same_met": same[chosen] >= GOAL * best,
        "later_requests": [round(share, 3) for share in shares],
        "later_met": min(shares, default=0.0) >= GOAL,
        "later_impossible": len(later) - len(possible),
        "best_later": [max(found, key=found.__getitem__) for found in possible],
        "requests_per_s": {
            name: [round(found[name], 2) for found in (same, *later)] for name in same
        },
    }


if __name__ == "__main__":
    main()
