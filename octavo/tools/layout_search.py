"""Finds the layout of N machines with the highest goodput for a trace, by simulation.

Goodput is the highest request rate at which enough requests meet the objective; the trace is sped
up or slowed down to vary the rate. Source: DistServe (Zhong et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.api.errors import ConfigError
from octavo.config.sizes import parse_duration_s
from octavo.engine.recording.recorder import RecordingHeader, StepPlanned, read_log
from octavo.tools.simulated_fleet import (
    FleetLayout,
    FleetOptionsSimulated,
    SimulatedEngine,
    SimulatedFleet,
    SimulatedRequest,
)

GOOD_SHARE = 0.9
"""Fraction of requests that must meet the objective."""
NUM_HALVINGS = 6
"""Bisection steps over the rate: the result is within 2% of the goodput."""
MAX_SPEED = 4096.0
MAX_MACHINES = 64


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency limits of a good request, in seconds."""

    ttft_s: float
    tpot_s: float

    @staticmethod
    def parse(text: str) -> Objective:
        """Parses "ttft=2s,tpot=80ms"; raises ConfigError if it is invalid."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, sign, value = part.strip().partition("=")
            if not sign or name not in ("ttft", "tpot") or name in limits:
                raise ConfigError(
                    f"slo: got {text!r}, expected ttft=TIME and tpot=TIME, each once",
                    hint="for example ttft=2s,tpot=80ms",
                )
            limits[name] = parse_duration_s(f"slo: {name}", value)
        if len(limits) < 2:
            raise ConfigError(f"slo: got {text!r}, expected ttft and tpot")
        return Objective(limits["ttft"], limits["tpot"])

    def is_met(self, request: SimulatedRequest) -> bool:
        return request.ttft <= self.ttft_s and request.tpot <= self.tpot_s


@dataclass(frozen=True, slots=True)
class RatedLayout:
    """A layout and its goodput."""

    layout: FleetLayout
    source: str
    """Recording of the engine."""
    requests_per_s: float
    """Goodput of all machines; 0 if even the slowest rate misses the objective."""
    is_bound: bool = False
    """Whether the goodput is the highest rate that was tried, so that the true goodput may be
    higher.
    """

    @property
    def per_machine(self) -> float:
        return self.requests_per_s / self.layout.num_machines


MakeRequests = Callable[[float], Sequence[SimulatedRequest]]
"""Builds the trace's requests, sped up by a factor."""


def read_engine(path: Path) -> SimulatedEngine:
    """Reads an engine and its step costs from a recording; raises ConfigError if it has none."""
    header, events = read_log(path)
    _check(path, header)
    costs = None
    for event in events:
        if isinstance(event, StepPlanned):
            costs = event.costs
    if costs is None or not costs.points:
        raise ConfigError(
            f"{path}: the recording has no measured steps",
            hint="record requests like those you expect: octavo serve MODEL --record FILE",
        )
    num_tokens = header.groups[0].num_blocks * header.block_size if header.groups else 0
    if not num_tokens:
        raise ConfigError(
            f"{path}: the recorded engine has no KV cache and generates no tokens",
            hint="record chat or completion requests",
        )
    return SimulatedEngine(
        header.scheduler,
        replace(header.cache, kv_events_config=None),
        header.groups,
        header.block_size,
        header.max_model_len,
        costs,
        token_bytes=header.kv_bytes / num_tokens,
    )


def list_layouts(num_machines: int) -> list[FleetLayout]:
    """Returns all layouts of `num_machines` machines: one engine on each, some of which may prefill
    for the others, or pipeline-parallel engines over several machines.
    """
    if not 1 <= num_machines <= MAX_MACHINES:
        raise ConfigError(f"machines: got {num_machines}, expected 1 to {MAX_MACHINES}")
    split = (FleetLayout(num_machines, prefill) for prefill in range(1, num_machines))
    stages = (
        FleetLayout(num_machines // num_stages, num_stages=num_stages)
        for num_stages in range(2, num_machines + 1)
        if num_machines % num_stages == 0
    )
    return [FleetLayout(num_machines), *split, *stages]


def rate_layouts(
    engines: Mapping[str, SimulatedEngine],
    make: MakeRequests,
    objective: Objective,
    num_machines: int,
    options: FleetOptionsSimulated,
) -> list[RatedLayout]:
    """Returns the goodput of each layout of each recorded engine, best first; `engines` by
    recording name.
    """
    found = []
    fastest = _rate(make(MAX_SPEED))
    for name, engine in engines.items():
        for layout in list_layouts(num_machines):
            rate = goodput(engine, layout, make, objective, options)
            found.append(RatedLayout(layout, name, rate, is_bound=rate >= fastest))
    return sorted(found, key=lambda rated: -rated.requests_per_s)


def goodput(
    engine: SimulatedEngine,
    layout: FleetLayout,
    make: MakeRequests,
    objective: Objective,
    options: FleetOptionsSimulated,
    *,
    num_halvings: int = NUM_HALVINGS,
) -> float:
    """Returns the goodput in requests per second."""

    def is_good(speed: float) -> bool:
        requests = SimulatedFleet(engine, layout, options).run(make(speed))
        good = sum(map(objective.is_met, requests))
        return good >= GOOD_SHARE * len(requests)

    low, high = 0.0, 1.0
    while is_good(high):
        if high >= MAX_SPEED:
            return _rate(make(high))
        low, high = high, 2 * high
    if low == 0.0:
        while not is_good(high):
            if high < 1 / MAX_SPEED:
                return 0.0
            high /= 2
        low, high = high, 2 * high
    for _ in range(num_halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return _rate(make(low))


def _rate(requests: Sequence[SimulatedRequest]) -> float:
    last = max(request.arrives for request in requests)
    return len(requests) / last if last else 0.0


def _check(path: Path, header: RecordingHeader) -> None:
    """Rejects recordings of engines that the simulation does not support."""
    stages = header.options.get("pipeline_parallel_size", 1)
    if stages != 1:
        raise ConfigError(
            f"{path}: recordings with pipeline_parallel_size {stages} are not supported",
            hint="record one with a single stage",
        )
    if header.tiers is not None:
        raise ConfigError(
            f"{path}: recordings with lower prefix cache tiers are not supported",
            hint="record one without prefix_cache_dir, kv_offloading_size and kv_pool",
        )
