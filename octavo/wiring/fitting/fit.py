"""Chooses options with which a model runs in the available memory (`octavo serve`).

Options that the user has set are never changed. If the defaults fit, they are kept. Otherwise the
first of these plans that fits is chosen, in order of what it costs: smaller steps and a KV cache of
fewer bits, a shorter context, weights streamed from disk. Works on headers; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.api.errors import ConfigError, InsufficientMemory, UnsupportedModel
from octavo.config.engine_config import EngineConfig
from octavo.config.paths import cache_dir
from octavo.config.sizes import format_bytes
from octavo.executor.devices import default_backend
from octavo.executor.kv import BLOCK_SIZE
from octavo.wiring.plan import ModelPlan, plan_model
from octavo.worker.capacity import SPARE, get_capacity
from octavo.worker.loaded_model import get_host_bytes

TYPICAL_CONTEXT = 2048
"""Length of a request in tokens for choosing how many run at once."""

CONTEXTS = (32768, 8192, TYPICAL_CONTEXT)
"""Context lengths in tokens that are worth a KV cache of fewer bits and smaller steps, longest
first."""

LEAST_CONTEXT = 64
"""Shortest context in tokens that is chosen."""

SHARES = (1.0, 0.75, 0.5)
"""Fractions of the longest context to try: a sliding window needs blocks for a step, too."""

SMALL_STEPS = (512, 128)
"""Step sizes in tokens to try."""

Options = Mapping[str, Any]
Measure = Callable[[ModelPlan], int]
"""Returns the best number of requests for a plan with streamed weights on this machine."""


@dataclass(frozen=True, slots=True)
class OptionChoice:
    """The value of an option, and why it was chosen."""

    option: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineFit:
    """Options for an engine, and the plan that they result in."""

    plan: ModelPlan
    options: dict[str, Any] = field(default_factory=dict)
    """Options to set besides the given ones; {} if the defaults fit."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache that the engine will allocate."""
        return self.plan.capacity.budget().num_bytes

    @property
    def predicted_bytes(self) -> int:
        """Bytes that the engine will use."""
        return self.plan.capacity.fixed_bytes + self.kv_bytes

    def describe(self) -> str:
        """Returns the chosen options in one line; "" if the defaults fit."""
        chosen = [choice for choice in self.choices() if choice.option in self.options]
        return "; ".join(f"{one.option} {one.value}: {one.reason}" for one in chosen)

    def choices(self) -> Iterator[OptionChoice]:
        """Yields the options that decide about memory, with the reasons."""
        plan, capacity, config = self.plan, self.plan.capacity, self.plan.config
        footprint, demand = plan.footprint, capacity.demand
        weights = sum(footprint.weight_bytes.values())
        if _reads_weights(plan):
            experts = footprint.read_in_part.get("experts")
            yield OptionChoice(
                "weights_memory_bytes",
                format_bytes(config.offload.weights_memory_bytes or 0),
                f"all weights have {format_bytes(weights)}"
                + ("" if experts else f"; a step reads {format_bytes(footprint.streamed_bytes)}"),
            )
            yield OptionChoice(
                "weights_dir", str(config.offload.weights_dir), "weights are streamed"
            )
            if experts:
                reason = "the experts used most often stay in memory"
                yield OptionChoice("weights_schedule", "experts", reason)
        else:
            reason = f"all weights fit, {format_bytes(weights)}"
            yield OptionChoice("weights_memory_bytes", "all", reason)
        yield OptionChoice(
            "max_num_batched_tokens",
            f"{demand.max_step_tokens:,}",
            f"activations of a step take {format_bytes(footprint.step_bytes)}",
        )
        yield OptionChoice(
            "kv_cache_dtype",
            footprint.kv_layouts[0].dtype if footprint.kv_layouts else "none",
            f"a token takes {format_bytes(capacity.kv_token_bytes)}",
        )
        limit = "the model's" if demand.max_model_len == plan.info.max_context_tokens else "fits"
        yield OptionChoice("max_model_len", f"{demand.max_model_len:,}", limit)
        yield OptionChoice(
            "kv_cache_memory_bytes",
            format_bytes(self.kv_bytes),
            f"{format_bytes(max(0, capacity.left_bytes))} are left beside weights and activations",
        )
        typical = min(TYPICAL_CONTEXT, demand.max_model_len)
        fit = self.kv_bytes // (capacity.request_bytes(typical) or 1) if plan.generates else 0
        requests = "1 request" if fit == 1 else f"{fit:,} requests"
        yield OptionChoice(
            "max_num_seqs",
            f"{demand.max_num_seqs:,}",
            f"room for {requests} of {typical:,} tokens" if fit else "the default",
        )
        yield OptionChoice(
            "threads", f"{config.backend.threads}", "physical cores, or the CPU quota"
        )
        speculation = config.scheduler.spec_method or "grammar"
        yield OptionChoice(
            "spec_method",
            speculation,
            "each verified token saves reading weights from disk"
            if "spec_method" in self.options
            else "the default",
        )


class EngineFitter:
    """Finds options for one model; keeps the plans that it has made."""

    def __init__(self, given: Options, measure: Measure = lambda plan: 1) -> None:
        """`given`: flat options that the user has set. `measure` chooses the number of requests
        beside streamed weights.
        """
        self._given = dict(given)
        self._measure = measure
        self._plans: dict[str, ModelPlan | None] = {}

    def fit(self, memory_bytes: int) -> EngineFit:
        """Returns the first plan that fits into `memory_bytes`. Raises InsufficientMemory if there
        is none.
        """
        base = self._plan({}, memory_bytes)
        assert base is not None, "errors of the user's own options are raised"
        name = base.config.model.served_model_name or base.config.model.model
        try:
            base.capacity.check(name)
        except ConfigError as error:
            refusal = error
        else:
            return EngineFit(base)
        for fit in self._candidates(base, memory_bytes):
            with suppress(ConfigError):  # one request needs more blocks than its tokens
                fit.plan.capacity.check(name)
                if fit.predicted_bytes <= memory_bytes:
                    return fit
        raise InsufficientMemory(refusal.message, hint=refusal.hint) from refusal

    def _candidates(self, base: ModelPlan, memory_bytes: int) -> Iterator[EngineFit]:
        tried = [
            (options, plan)
            for options in self._variants(base)
            if (plan := self._plan(options, memory_bytes)) is not None
        ]
        longest = base.capacity.demand.max_model_len
        wanted = sorted({min(context, longest) for context in CONTEXTS}, reverse=True)
        for context in [longest] if "max_model_len" in self._given else wanted:
            for options, plan in tried:
                if plan.capacity.max_context() >= context:
                    yield from self._resident(options, plan, memory_bytes)
        for context in [longest] if "max_model_len" in self._given else wanted[-2:]:
            for options in self._variants(base):
                yield from self._streamed(options, context, memory_bytes)
        for options, plan in reversed(tried):
            if plan.capacity.max_context() >= min(LEAST_CONTEXT, longest):
                yield from self._resident(options, plan, memory_bytes)

    def _variants(self, base: ModelPlan) -> Iterator[dict[str, Any]]:
        """Yields options that reduce memory, cheapest first; without those that the user set."""
        steps = [None, *SMALL_STEPS]
        precisions = [None, "int8", "k8v4"]
        seen: list[dict[str, Any]] = []
        for precision in precisions:
            for step in steps:
                options: dict[str, Any] = {}
                if precision is not None:
                    options["kv_cache_dtype"] = precision
                if step is not None and step < base.config.scheduler.max_num_batched_tokens:
                    options["max_num_batched_tokens"] = step
                if options not in seen and not options.keys() & self._given.keys():
                    seen.append(options)
                    yield options

    def _resident(
        self, options: Options, plan: ModelPlan, memory_bytes: int
    ) -> Iterator[EngineFit]:
        """Yields plans with all weights in memory, with the longest context that fits first."""
        longest, kv_bytes = plan.capacity.max_context(), plan.capacity.kv_bytes
        for share in SHARES:
            context = max(int(longest * share) // BLOCK_SIZE * BLOCK_SIZE, min(longest, BLOCK_SIZE))
            if longest == plan.capacity.demand.max_model_len and share == 1:
                context = longest
            yield self._finish(options, context, kv_bytes, memory_bytes)

    def _finish(
        self, options: Options, context: int, kv_bytes: int, memory_bytes: int
    ) -> EngineFit:
        """Adds the context, the size of the KV cache and the number of requests to `options`."""
        chosen = dict(options)
        base = self._plan(chosen, memory_bytes)
        assert base is not None, "it was planned before"
        if context < base.capacity.demand.max_model_len:
            chosen["max_model_len"] = context
        capacity = base.capacity
        typical = capacity.request_bytes(min(TYPICAL_CONTEXT, context))
        most = capacity.demand.max_num_seqs
        num_requests = min(most, max(1, kv_bytes // typical)) if typical else most
        if num_requests < most:
            chosen["max_num_seqs"] = num_requests
        if base.generates:
            longest = num_requests * capacity.request_bytes(context)
            states = num_requests * capacity.state_bytes
            chosen["kv_cache_memory_bytes"] = min(kv_bytes, max(longest + 2 * states, typical))
        chosen = {name: value for name, value in chosen.items() if name not in self._given}
        plan = self._plan(chosen, memory_bytes)
        assert plan is not None, "a shorter context is supported"
        return EngineFit(plan, chosen)

    def _streamed(self, options: Options, context: int, memory_bytes: int) -> Iterator[EngineFit]:
        """Yields a plan that streams the weights which do not fit beside the KV cache of some
        requests of this context; nothing if the model or the backend does not support it.
        """
        if "weights_memory_bytes" in self._given:
            return
        shape = {**options, "max_model_len": context}
        shape = {name: value for name, value in shape.items() if name not in self._given}
        plan = self._plan(shape, memory_bytes)
        if plan is None or plan.config.backend.backend != "native":
            return
        offload = {
            "weights_dir": str(cache_dir() / "weights"),
            "weights_schedule": "experts",
            "spec_method": "suffix",
        }
        offload = {name: value for name, value in offload.items() if name not in self._given}
        capacity = plan.capacity
        requests = 1
        for _ in range(2):
            kv_bytes = requests * capacity.request_bytes(context) + 2 * capacity.state_bytes
            usable = memory_bytes - (capacity.fixed_bytes - capacity.weight_bytes)
            weights_bytes = int((usable - kv_bytes) * (1 - SPARE))
            if weights_bytes <= 0:
                return
            streamed = {**shape, **offload, "weights_memory_bytes": weights_bytes}
            found = self._plan(streamed, memory_bytes)
            if found is None and "weights_schedule" in offload:  # the model has no experts
                del offload["weights_schedule"]
                streamed.pop("weights_schedule")
                found = self._plan(streamed, memory_bytes)
            if found is None or not _reads_weights(found):
                return
            try:
                best = self._measure(found)
            except ConfigError:  # the directory is not writable, or its disk is full
                return
            if best <= requests:
                break
            requests = best
        yield self._finish(streamed, context, kv_bytes, memory_bytes)

    def _plan(self, options: Options, memory_bytes: int) -> ModelPlan | None:
        """Plans the model with these options and the given ones; returns None if they are not
        supported. Errors of the given options alone are raised.
        """
        key = repr(sorted(options.items()))
        if key not in self._plans:
            try:
                config = EngineConfig.from_options(**{**options, **self._given})
                self._plans[key] = plan_model(config, memory_bytes=memory_bytes)
            except (ConfigError, UnsupportedModel):
                if not options:
                    raise
                self._plans[key] = None
        plan = self._plans[key]
        return None if plan is None else _with_memory(plan, memory_bytes)


def _reads_weights(plan: ModelPlan) -> bool:
    """Returns whether steps read weights from a file."""
    return bool(plan.footprint.streamed_bytes or plan.footprint.read_in_part)


def _with_memory(plan: ModelPlan, memory_bytes: int) -> ModelPlan:
    capacity = get_capacity(plan.config, plan.footprint, memory_bytes)
    return replace(plan, capacity=capacity)


def fit_to_memory(given: Options, memory_bytes: int | None = None) -> EngineFit | None:
    """Finds options for this machine's free memory, or for `memory_bytes`. Returns None if the
    memory is unknown, or the backend knows its own only after loading.
    """
    from octavo.wiring.fitting.machine_rates import best_num_requests

    config = EngineConfig.from_options(**given)
    if memory_bytes is None:
        memory_bytes = get_host_bytes(config)
    if memory_bytes is None or (config.backend.backend or default_backend()) == "torch":
        return None
    num_engines = config.fleet.data_parallel_size
    fitter = EngineFitter(given, lambda plan: best_num_requests(plan, TYPICAL_CONTEXT))
    return fitter.fit(memory_bytes // num_engines)
