"""`octavo plan --trace`: finds the layout of several machines that serves recorded traffic best.

Simulates schedulers and router; step costs come from recordings of an engine. Loads no model.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.api.errors import ConfigError
from octavo.config.sizes import parse_rate

if TYPE_CHECKING:
    from octavo.tools.bench.traffic import TrafficRequest
    from octavo.tools.simulated_fleet import SimulatedEngine

SEED = 0


@dataclass(frozen=True, slots=True)
class TracePlan:
    """Options of `octavo plan --trace`."""

    trace: Path
    recordings: Sequence[Path]
    slo: str
    num_machines: int
    link: str
    scale: str
    num_requests: int

    def run(self, *, json: bool) -> None:
        """Prints the layouts, best first."""
        from octavo.tools.bench.traffic import make_prompt, parse_scale, read_trace, spread_arrivals
        from octavo.tools.layout_search import Objective, rate_layouts, read_engine
        from octavo.tools.simulated_fleet import FleetOptionsSimulated, SimulatedRequest

        if not self.recordings:
            raise ConfigError(
                "costs: recording required",
                hint="record requests like those of the trace: octavo serve MODEL --record FILE",
            )
        objective = Objective.parse(self.slo)
        options = FleetOptionsSimulated(link_bytes_per_s=parse_rate(self.link, name="link") / 8)
        scale = parse_scale(self.scale)
        rows = spread_arrivals(read_trace(self.trace, scale=scale, num_requests=self.num_requests))
        prompts = [make_prompt(row, SEED) for row in rows]

        def make(speed: float) -> list[SimulatedRequest]:
            return [
                SimulatedRequest(f"r{number}", row.at_s / speed, prompt, row.output_len)
                for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
            ]

        if rows[-1].at_s == 0:
            raise ConfigError(
                f"num_requests: the first {len(rows)} requests of {self.trace} arrive at the same"
                f" time",
                hint="use more requests",
            )
        names = Counter(path.name for path in self.recordings)
        engines = {
            path.name if names[path.name] == 1 else str(path): read_engine(path)
            for path in self.recordings
        }
        self._check_lengths(rows, engines)
        rated_layouts = rate_layouts(engines, make, objective, self.num_machines, options)
        if json:
            import json as json_format

            rated = [
                asdict(layout) | {"per_machine": layout.per_machine} for layout in rated_layouts
            ]
            print(json_format.dumps({"simulated": True, "layouts": rated}))
            return
        print(
            f"simulated: {len(rows)} requests of {self.trace.name}, {self.slo}, met by 90%;"
            f" {self.num_machines} machines, {self.link}bit/s"
        )
        for layout in rated_layouts:
            print(
                f"{layout.layout!s:28} {layout.source:24} {layout.requests_per_s:9.3g}"
                f"{'+' if layout.is_bound else ''} requests/s, {layout.per_machine:.3g} a machine"
            )
        if not rated_layouts[0].requests_per_s:
            print("octavo: no layout meets the objective at any rate", file=sys.stderr)
        if any(layout.is_bound for layout in rated_layouts):
            print(
                "octavo: a rate that ends in + was the highest tried, and kept to the objective",
                file=sys.stderr,
            )

    def _check_lengths(
        self, rows: Sequence[TrafficRequest], engines: Mapping[str, SimulatedEngine]
    ) -> None:
        """Reports how many requests exceed an engine's context; these miss the objective. Raises
        ConfigError if the others are too few to reach the objective at any rate.
        """
        from octavo.tools.layout_search import GOOD_SHARE

        for name, engine in engines.items():
            num_long = sum(row.input_len >= engine.max_model_len for row in rows)
            if not num_long:
                continue
            what = (
                f"{num_long} of {len(rows)} requests of {self.trace.name} reach the context of"
                f" {name}, {engine.max_model_len:,} tokens"
            )
            if num_long > (1 - GOOD_SHARE) * len(rows):
                raise ConfigError(
                    f"trace: {what}",
                    hint="scale the lengths down, e.g. --scale=1/32, or record an engine with a"
                    " larger max_model_len",
                )
            print(f"octavo: {what}: they count as late", file=sys.stderr)
