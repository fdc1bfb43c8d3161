"""Discrete-event simulation of a fleet: real schedulers and a real router, with step times from a
recording.

Events are arrivals, ends of steps, and arrivals of KV blocks from prefill engines. Blocks travel
over a link of a given rate while they are computed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from octavo.api.errors import ConfigError
from octavo.api.sampling_params import SamplingParams
from octavo.config.cache_options import CacheOptions
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.core import EngineCore
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.protocol.block_hashes import BlockHashing
from octavo.engine.protocol.cached_hashes import CachedHashes
from octavo.engine.protocol.outputs import EngineOutput
from octavo.engine.protocol.ports import Executor
from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.protocol.step import ScheduledRequest
from octavo.engine.protocol.step_costs import StepCosts
from octavo.engine.routing.job import RoutingJob
from octavo.engine.routing.policies import ROUTING_POLICIES, RoutingPolicyName
from octavo.engine.routing.router import Router
from octavo.engine.routing.target import Target
from octavo.engine.scheduler.build import build_scheduler
from octavo.worker.simulated import SimulatedClock, SimulatedExecutor, SimulatedPipeline

MAX_IDLE_STEPS = 10_000
"""Maximum number of consecutive steps without computation before the simulation fails."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """An engine, as read from a recording."""

    scheduler: SchedulerOptions
    cache: CacheOptions
    groups: Sequence[BlockGroup]
    block_size: int
    max_model_len: int
    costs: StepCosts
    token_bytes: float
    """KV bytes of one token in all groups, as sent over a link."""


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """Number and roles of the engines."""

    num_engines: int
    num_prefill: int = 0
    """Number of engines that only prefill, for the others; 0: each engine prefills its own
    prompts.
    """
    num_stages: int = 1
    """Number of pipeline stages of each engine, one machine per stage."""

    @property
    def num_machines(self) -> int:
        return self.num_engines * self.num_stages

    def __str__(self) -> str:
        if self.num_stages > 1:
            return f"{self.num_engines} x both in {self.num_stages} stages"
        if not self.num_prefill:
            return f"{self.num_engines} x both"
        return f"{self.num_prefill} x prefill + {self.num_engines - self.num_prefill} x decode"


@dataclass(frozen=True, slots=True)
class FleetOptionsSimulated:
    """Routing policy and link rate."""

    policy: RoutingPolicyName = "kv"
    link_bytes_per_s: float = 125e6
    """Rate of each machine's link, per direction."""


@dataclass(slots=True)
class SimulatedRequest:
    """A request and its simulated times in seconds."""

    name: str
    arrives: float
    prompt: list[int]
    num_output: int
    first_token: float = math.inf
    end: float = math.inf
    num_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrives

    @property
    def tpot(self) -> float:
        """Mean time between tokens; 0 for a single token."""
        if self.num_tokens < 2:
            return 0.0
        return (self.end - self.first_token) / (self.num_tokens - 1)


class MeasuredExecutor(SimulatedExecutor):
    """An executor with step times from measured costs."""

    def __init__(
        self, clock: SimulatedClock, costs: StepCosts, comes_computed: Callable[[str], bool]
    ) -> None:
        """`comes_computed` is a function that returns whether another engine has prefilled a
        request's prompt.
        """
        super().__init__(clock)
        self._measured = costs
        self._comes_computed = comes_computed

    def compute_s(self, rows: list[ScheduledRequest]) -> float:
        """For prompts that another engine has prefilled, counts only the last token."""
        num_tokens = num_keys = 0
        for row in rows:
            fetched = row.num_tokens > 1 and self._comes_computed(row.request_id)
            num_tokens += 1 if fetched else row.num_tokens
            num_keys += row.start + row.num_tokens
        seconds = self._measured.step_s(num_tokens, num_keys) if rows else 0.0
        assert seconds is not None, "costs without a measured step are refused before"
        return seconds


@dataclass(slots=True)
class _Member:
    core: EngineCore
    clock: SimulatedClock
    is_busy: bool = False
    link_free: float = 0.0
    """Time at which the engine's link will have sent everything queued."""
    busy_s: float = 0.0
    """Total time of the engine's steps, in seconds."""
    num_idle_steps: int = 0


class SimulatedFleet:
    """Runs requests through a fleet once."""

    def __init__(
        self, engine: SimulatedEngine, layout: FleetLayout, options: FleetOptionsSimulated
    ) -> None:
        if not engine.costs.points:
            raise ConfigError(
                "costs: the recording has no measured steps",
                hint="record requests like those you expect: octavo serve MODEL --record FILE",
            )
        self._engine = engine
        self._options = options
        self._layout = layout
        self._fetched: set[str] = set()
        """Requests with prompts prefilled elsewhere."""
        self._members = [self._member() for _ in range(layout.num_engines)]
        targets = [
            Target(f"engine {index}", CachedHashes(self._groups[0].num_blocks))
            for index in range(layout.num_engines)
        ]
        self._router = Router(ROUTING_POLICIES[options.policy](), targets)
        prefill = range(layout.num_prefill)
        self._first = prefill if prefill else range(layout.num_engines)
        self._last = range(layout.num_prefill, layout.num_engines)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = itertools.count()
        self._requests: dict[str, SimulatedRequest] = {}
        self._hashing = BlockHashing()

    def run(self, requests: Sequence[SimulatedRequest]) -> Sequence[SimulatedRequest]:
        """Returns the requests with their times filled in."""
        for request in requests:
            self._requests[request.name] = request
            self._at(request.arrives, partial(self._arrive, request))
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)
        return requests

    @property
    def busy_s(self) -> list[float]:
        """Total step time of each engine, in seconds."""
        return [member.busy_s for member in self._members]

    def _member(self) -> _Member:
        engine, num_stages = self._engine, self._layout.num_stages
        clock = SimulatedClock()
        options = engine.scheduler
        if num_stages > 1:  # a stage receives a token when the last stage has sampled it
            options = replace(options, num_scheduler_steps=1)
        scheduler = build_scheduler(
            options,
            engine.cache,
            self._groups,
            block_size=engine.block_size,
            max_model_len=engine.max_model_len,
            num_micro_batches=num_stages,
        )
        own = clock if num_stages == 1 else SimulatedClock()
        whole = MeasuredExecutor(own, engine.costs, self._fetched.__contains__)
        executor: Executor = whole
        if num_stages > 1:
            executor = SimulatedPipeline(clock, num_stages, whole=whole)
        core = EngineCore(
            scheduler, executor, clock=clock, costs=engine.costs, num_micro_batches=num_stages
        )
        return _Member(core, clock)

    @property
    def _groups(self) -> Sequence[BlockGroup]:
        """Cache groups of an engine. With n pipeline stages, each machine stores 1/n of every
        token's KV, so there are n times as many blocks.
        """
        num_stages = self._layout.num_stages
        return [
            BlockGroup(
                num_stages * group.num_blocks, group.spec, num_stages * group.num_host_blocks
            )
            for group in self._engine.groups
        ]

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), act))

    def _arrive(self, request: SimulatedRequest, now: float) -> None:
        names = (
            self._hashing.digests(request.prompt, self._engine.block_size)
            if self._router.needs_hashes
            else ()
        )
        job = RoutingJob(len(request.prompt), names, self._engine.block_size)
        if not self._layout.num_prefill:
            index = self._router.choose(job, self._first, now)
            self._router.sent(request.name, job, index, now)
            self._add(index, request, request.num_output, now)
            return
        index = self._router.choose(job, self._first, now)
        self._router.sent(f"prefill {request.name}", job, index, now)
        self._add(index, request, 1, now, name=f"prefill {request.name}")

    def _add(
        self,
        index: int,
        request: SimulatedRequest,
        num_output: int,
        now: float,
        *,
        name: str | None = None,
    ) -> None:
        member = self._members[index]
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        member.core.add(
            EngineRequest(
                name or request.name,
                request.prompt,
                params,
                seed=0,
                arrival_time=now,
            )
        )
        if not member.is_busy:
            self._step(index, now)

    def _step(self, index: int, now: float) -> None:
        """Simulates one step of an engine; its outputs are delivered when it ends."""
        member = self._members[index]
        member.is_busy = member.core.has_work
        if not member.is_busy:
            return
        member.clock.now = max(member.clock.now, now)
        pause_s = member.core.pause_s()
        if pause_s:
            member.is_busy = False
            self._at(now + pause_s, partial(self._resume, index))
            return
        began = member.clock.now
        outputs = member.core.step().outputs
        member.busy_s += member.clock.now - began
        member.num_idle_steps = 0 if member.clock.now > began else member.num_idle_steps + 1
        assert member.num_idle_steps < MAX_IDLE_STEPS, "an engine has work and computes none of it"
        self._at(member.clock.now, partial(self._done, index, outputs))

    def _resume(self, index: int, now: float) -> None:
        if not self._members[index].is_busy:
            self._step(index, now)

    def _done(self, index: int, outputs: Sequence[EngineOutput], now: float) -> None:
        for output in outputs:
            self._router.record_tokens(output.request_id, len(output.token_ids), now)
            if output.finish_reason is not None:
                self._router.ended(output.request_id)
            self._handle_output(index, output, now)
        self._step(index, now)

    def _handle_output(self, index: int, output: EngineOutput, now: float) -> None:
        is_prefill = output.request_id.startswith("prefill ")
        request = self._requests[output.request_id.removeprefix("prefill ")]
        if output.error is not None:
            request.error = output.error
        elif is_prefill:
            if output.finish_reason is not None:
                self._send(index, request, now)
        else:
            if output.token_ids and not request.num_tokens:
                request.first_token = now
            request.num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                request.end = now

    def _send(self, index: int, request: SimulatedRequest, now: float) -> None:
        """Sends the blocks of a prefilled prompt over the engine's link.

        Blocks are sent while the prompt is computed, so decoding starts at the end of the prefill
        or when the link has sent them all, whichever is later.
        """
        member, engine = self._members[index], self._engine
        carried_s = len(request.prompt) * engine.token_bytes / self._options.link_bytes_per_s
        chunk = engine.scheduler.max_num_batched_tokens
        computed_s = engine.costs.prefill_s(len(request.prompt), chunk) or 0.0
        member.link_free = max(member.link_free, now - computed_s) + carried_s
        self._at(max(now, member.link_free), partial(self._decode, request))

    def _decode(self, request: SimulatedRequest, now: float) -> None:
        self._fetched.add(request.name)
        job = RoutingJob(len(request.prompt), (), self._engine.block_size)
        index = min(self._last, key=lambda index: self._router.targets[index].held_tokens)
        self._router.sent(request.name, job, index, now)
        self._add(index, request, request.num_output, now)
