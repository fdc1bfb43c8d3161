"""The real control plane over the simulated executor: requests arrive at their times, and their
first and last tokens are timed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from octavo.api.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.protocol.requests import EngineRequest
from octavo.worker.simulated import SimulatedClock, SimulatedCosts, SimulatedExecutor
from tests.support.engine_fakes import make_core


@dataclass(slots=True)
class RequestRecord:
    """A request's times, in simulated seconds."""

    tenant: str
    arrival_time: float
    first_token_time: float = math.inf
    end_time: float = math.inf
    num_tokens: int = 0

    @property
    def time_to_first_token(self) -> float:
        return self.first_token_time - self.arrival_time


@dataclass
class Simulation:
    """A run of the control plane. Tokens are counted by tenant in windows of `window_s` seconds."""

    core: EngineCore
    clock: SimulatedClock
    window_s: float = 10.0
    records: dict[str, RequestRecord] = field(default_factory=dict)
    tokens: dict[int, Counter[str]] = field(default_factory=dict)
    """Tokens by window and tenant: prompt tokens with the first token, then each new one."""
    longest_step_s: float = 0.0

    def run(self, requests: Iterable[EngineRequest], *, until: float = math.inf) -> Simulation:
        """Runs to the end, or until a time is reached."""
        coming = sorted(requests, key=lambda request: request.arrival_time)
        index = 0
        prompts = {request.request_id: len(request.prompt_token_ids) for request in coming}
        while (index < len(coming) or self.core.has_work) and self.clock.now < until:
            if not self.core.has_work:
                self.clock.now = max(self.clock.now, coming[index].arrival_time)
            while index < len(coming) and coming[index].arrival_time <= self.clock.now:
                self.add(coming[index])
                index += 1
            pause_s = self.core.pause_s()
            if pause_s:
                following = coming[index].arrival_time if index < len(coming) else math.inf
                self.clock.now = min(self.clock.now + pause_s, following)
                continue
            self.step(prompts)
        return self

    def add(self, request: EngineRequest) -> None:
        self.records[request.request_id] = RequestRecord(request.tenant, request.arrival_time)
        self.core.add(request)

    def step(self, prompts: dict[str, int]) -> None:
        began = self.clock.now
        outputs = self.core.step().outputs
        now = self.clock.now
        self.longest_step_s = max(self.longest_step_s, now - began)
        counts = self.tokens.setdefault(int(now // self.window_s), Counter())
        for output in outputs:
            record = self.records[output.request_id]
            if record.num_tokens == 0:
                record.first_token_time = now
                counts[record.tenant] += prompts[output.request_id]
            record.num_tokens += len(output.token_ids)
            counts[record.tenant] += len(output.token_ids)
            if output.finish_reason is not None:
                assert output.error is None, output.error
                record.end_time = now

    def of(self, tenant: str) -> list[RequestRecord]:
        return [record for record in self.records.values() if record.tenant == tenant]


def simulation(*, costs: SimulatedCosts | None = None, **options) -> Simulation:
    """Returns a simulation; `options` are `make_core`'s."""
    clock = SimulatedClock()
    return Simulation(
        make_core(executor=SimulatedExecutor(clock, costs), clock=clock, **options), clock
    )


def request_of(
    request_id: str,
    arrival_time: float,
    num_prompt: int,
    num_output: int,
    *,
    tenant: str = "",
    priority: int = 0,
) -> EngineRequest:
    """Returns a request whose prompt no other one shares, the same in every process."""
    number = crc32(request_id.encode()) % 100_000
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    prompt = [number + i for i in range(num_prompt)]
    return EngineRequest(
        request_id,
        prompt,
        params,
        seed=0,
        tenant=tenant,
        priority=priority,
        arrival_time=arrival_time,
    )


def percentile(values: Iterable[float], percent: float) -> float:
    ranked: Sequence[float] = sorted(values)
    return ranked[math.ceil(len(ranked) * percent / 100) - 1]
