"""Builds engines: the core (a scheduler over a loaded model), its client, and the frontend.

The core runs in this process (`LLM`, tests), in its own process (`serve`), or is only the executor
of a recording (`octavo replay`).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.api.errors import ConfigError, EngineDead, OctavoError
from octavo.config.checks import get_async_scheduling_conflict
from octavo.config.config_hooks import reuses_generated
from octavo.config.engine_config import EngineConfig, option_fields
from octavo.engine.clients.client import EngineClient, EngineInfo
from octavo.engine.clients.in_process import InProcessClient
from octavo.engine.core import EngineCore
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.kv.kv_connector import Tiers
from octavo.engine.kv_meter import KvMeter
from octavo.engine.protocol.kv_events import logged_only
from octavo.engine.protocol.ports import Executor, Profiler
from octavo.engine.recording.recorder import (
    FORMAT,
    Recorder,
    RecordingHeader,
    check_writable,
)
from octavo.engine.requests.stop_strings import LazyStopTexts, MakeStopTexts
from octavo.engine.scheduler.build import build_scheduler, prompt_limits
from octavo.executor.base import Backend
from octavo.executor.kv import BLOCK_SIZE
from octavo.frontend.encoder_inputs import EncoderInputs
from octavo.frontend.frontend import Frontend
from octavo.frontend.input_processor import InputProcessor, ModelLimits
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.pooling import PoolingInputs
from octavo.frontend.priority_function import PriorityFunction
from octavo.program.ops import original_context
from octavo.program.passes.draft_groups import whole_groups
from octavo.text.grammar.lazy import LazyGrammars
from octavo.text.ports import Tokenizer
from octavo.utils.progress import Report
from octavo.utils.version import __version__
from octavo.wiring.adapters import adapter_names
from octavo.wiring.events import open_publishers
from octavo.wiring.grammars import end_token_ids, lazy_grammars
from octavo.wiring.media.build import make_embeds_reader, make_media_reader
from octavo.wiring.model import (
    Model,
    build_tokenizer,
    load_model,
    open_model,
)
from octavo.wiring.processes import start_processes
from octavo.wiring.rank_connections import RankConnections
from octavo.wiring.ranks import start_other_ranks
from octavo.wiring.rendezvous import join_engines
from octavo.wiring.sampling_defaults import sampling_defaults
from octavo.wiring.tiers import build_tiers
from octavo.wiring.transcription import accepts_audio, make_transcriptions
from octavo.worker.loaded_model import LoadedModel, device_memory
from octavo.worker.memory import KvBudget, memory_table
from octavo.worker.ranks.start import common_budget, common_worker, end_ranks
from octavo.worker.worker import Worker

if TYPE_CHECKING:
    from octavo.frontend.kv_event_publisher import KVEventPublisher
    from octavo.wiring.engine_rendezvous import EngineEndpoint
    from octavo.worker.engine_links import EngineLinks
    from octavo.worker.joined_executor import JoinedExecutor
    from octavo.worker.ranks.other_ranks import OtherRanks
    from octavo.worker.ranks.ranked_worker import RankedWorker
    from octavo.worker.stages.pipelined_worker import PipelinedWorker


AnyWorker: TypeAlias = "Worker | RankedWorker | PipelinedWorker | JoinedExecutor"
"""Type of a core's executor, which depends on the parallelism."""

WhenStarted: TypeAlias = Callable[[Callable[[], None]], None]
"""Receives a function that ends the process that is loading a model."""


@dataclass(frozen=True, slots=True)
class CoreTexts:
    """Parts of a core that need the tokenizer."""

    stop_texts: MakeStopTexts
    grammars: LazyGrammars


@dataclass(frozen=True, slots=True)
class BuiltCore:
    """A core, its description for frontends, and its worker."""

    core: EngineCore
    info: EngineInfo
    worker: AnyWorker


# -- fronts ----------------------------------------------------------------------------------------


def build_in_process(config: EngineConfig, report: Report) -> Frontend:
    """Builds an engine with the core in this process; data-parallel engines run in separate
    processes.
    """
    if config.fleet.data_parallel_size > 1:
        return build_with_process(config, report)
    publishers = open_publishers(config)
    try:
        model = open_model(config)
        tokenizer = build_tokenizer(model)
        texts = core_texts(model, lambda: tokenizer)
        built = build_core(model, report, texts)
        client = InProcessClient(built.core, built.info)
        frontend = _build_frontend(
            model,
            client,
            built.info,
            tokenizer,
            report,
            grammars=texts.grammars,
            profiler=built.worker,
        )
    except BaseException:
        _close(publishers)
        raise
    frontend.publishers = publishers
    gc.freeze()  # a full collection would visit the model between two steps (0.2 s)
    return frontend


def build_with_process(
    config: EngineConfig, report: Report, when_started: WhenStarted = lambda end: None
) -> Frontend:
    """Builds an engine with each core in its own process, which loads the model while this one
    loads the tokenizer.
    """
    publishers = open_publishers(config)
    try:
        frontend = _build_with_process(config, report, when_started)
    except BaseException:
        _close(publishers)
        raise
    frontend.publishers = publishers
    return frontend


def _build_with_process(
    config: EngineConfig, report: Report, when_started: WhenStarted
) -> Frontend:
    model = open_model(config)
    client = start_processes(model, report)
    try:
        when_started(client.close)
        tokenizer = build_tokenizer(model)
        info = client.wait_until_ready(report)
    except BaseException:
        client.close()
        raise
    grammars = lazy_grammars(model, lambda: tokenizer)
    return _build_frontend(model, client, info, tokenizer, report, grammars=grammars)


def encoder_inputs(model: Model) -> EncoderInputs | None:
    """Builds the validator of encoder inputs; None if the model has no encoder."""
    info, max_tokens = model.info, model.config.model.max_encoder_len
    if max_tokens is None:
        return None
    return EncoderInputs(info.decoder_prompt, max_tokens, accepts_audio(model))


def banned_token_ids(model: Model) -> tuple[int, ...]:
    """Returns the tokens that are never sampled: those of generation_config.json, unless
    --generation-config selects another source.
    """
    is_own = model.info.is_encoder_decoder or model.config.model.generation_config == "auto"
    return model.info.banned_token_ids if is_own else ()


def _close(publishers: Iterable[KVEventPublisher]) -> None:
    for publisher in publishers:
        publisher.close()


def _build_frontend(
    model: Model,
    client: EngineClient,
    info: EngineInfo,
    tokenizer: Tokenizer | None,
    report: Report,
    *,
    grammars: LazyGrammars,
    profiler: Profiler | None = None,
) -> Frontend:
    options, pools = model.config.scheduler, model.pools()
    prompts = prompt_limits(
        options,
        model.config.cache,
        max_model_len=info.max_model_len,
        kv_capacity_tokens=info.kv_capacity_tokens,
        block_size=BLOCK_SIZE,
    )
    inputs = InputProcessor(
        limits=ModelLimits(
            info.vocab_size,
            prompts,
            model.config.model.get_max_logprobs(info.vocab_size),
            tuple(entry.name for entry in model.config.sampler.processors),
            searches_forms=model.config.backend.backend != "torch",
        ),
        tokenizer=tokenizer,
        eos_token_ids=end_token_ids(model.info, tokenizer),
        seed=model.config.model.seed,
        scheduling_policy=options.scheduling_policy,
        priority_function=None
        if options.priority_function is None
        else PriorityFunction(options.priority_function),
        grammars=grammars,
        images=make_media_reader(model.config, model.checkpoint, tokenizer),
        embeds=make_embeds_reader(model.config, model.program, prompts),
        encoder=encoder_inputs(model),
        banned_token_ids=banned_token_ids(model),
    )
    sampling = sampling_defaults(
        model.config.model,
        model.checkpoint,
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        has_encoder=model.config.model.max_encoder_len is not None,
    )
    if pools is None and sampling.values:
        report(sampling.describe())
    return Frontend(
        config=model.config,
        client=client,
        inputs=inputs,
        pooling=None if pools is None else PoolingInputs(pools, inputs),
        outputs=OutputProcessor(tokenizer),
        sampling=sampling,
        profiler=profiler,
        transcriptions=make_transcriptions(model, inputs),
        adapters=adapter_names(model.config, model.program(), model.checkpoint.path),
    )


# -- cores -----------------------------------------------------------------------------------------


def build_core_of_options(
    options: dict[str, Any], report: Report, endpoint_numbers: Sequence[int] = ()
) -> tuple[EngineCore, EngineInfo]:
    """Builds a core from flat options; entry point of the core's process. `endpoint_numbers`
    identifies the engine among those that share experts.
    """
    engine, links = _join_engine(endpoint_numbers)
    model = open_model(EngineConfig.from_options(**options))
    texts = core_texts(model, lambda: build_tokenizer(model))
    try:
        built = build_core(model, report, texts, engine, links)
    except EngineDead as error:
        lost = None if links is None else links.await_loss()
        raise lost or error from None
    return built.core, built.info


def _join_engine(
    endpoint_numbers: Sequence[int],
) -> tuple[EngineEndpoint | None, EngineLinks | None]:
    """Returns this engine's place among the engines that share experts, and its connections to
    them; None without expert sharing.
    """
    if not endpoint_numbers:
        return None, None
    from octavo.wiring import engine_rendezvous
    from octavo.worker import engine_links

    engine = engine_rendezvous.EngineEndpoint.from_numbers(endpoint_numbers)
    return engine, engine_links.EngineLinks(engine.index, engine.links)


def core_texts(model: Model, read: Callable[[], Tokenizer | None]) -> CoreTexts:
    """Returns the parts of a core that need the tokenizer, which is loaded on first use."""
    read_once = functools.cache(read)
    return CoreTexts(LazyStopTexts(read_once), lazy_grammars(model, read_once))


def build_core(
    model: Model,
    report: Report,
    texts: CoreTexts,
    engine: EngineEndpoint | None = None,
    links: EngineLinks | None = None,
) -> BuiltCore:
    """Loads the weights, allocates the KV cache and builds the scheduler; starts other ranks first.

    `engine` and `links` are the place among engines that share experts and the connections to them.
    """
    if model.config.observe.record is not None:
        check_writable(Path(model.config.observe.record))
    if model.config.backend.num_ranks == 1:
        connections = RankConnections()
        if engine is not None:
            connections = join_engines(model.config, connections, engine.index, engine.rooms[0])
        return _build_core(model, report, texts, connections, links=links)
    connections, others = start_other_ranks(model, engine)
    try:
        return _build_core(model, report, texts, connections, others, links=links)
    except BaseException as error:
        raise end_ranks(others, error) from None


def _make_abort(
    connections: RankConnections, others: OtherRanks | None
) -> Callable[[OctavoError], None]:
    """Returns a function that aborts this engine's waits when another engine that shares the
    experts has ended.
    """

    def end(error: OctavoError) -> None:
        connections.abort()
        if others is not None:
            others.lose(error)

    return end


def _build_core(
    model: Model,
    report: Report,
    texts: CoreTexts,
    connections: RankConnections | None = None,
    others: OtherRanks | None = None,
    *,
    links: EngineLinks | None = None,
) -> BuiltCore:
    config = model.config
    if links is not None and connections is not None:
        links.when_lost(_make_abort(connections, others))
    loaded = load_model(model, report, texts.grammars, connections)
    budget = common_budget(loaded, others)
    if (memory := device_memory(loaded.backend)) is not None:
        report(memory_table(memory, budget.num_bytes))
    report(budget.describe())
    groups = _block_groups(config, budget)
    off_device = build_tiers(
        model.checkpoint, loaded, whole_groups(model.program(), loaded.program), report
    )
    num_blocks = [group.num_blocks for group in groups]
    num_host_blocks = [group.num_host_blocks for group in groups]
    own = common_worker(
        loaded,
        others,
        num_blocks,
        num_host_blocks,
        connector=off_device.worker,
        sharing=off_device.sharing,
        report=report,
    )
    worker: AnyWorker = own
    if links is not None:
        from octavo.worker.joined_executor import JoinedExecutor

        worker = JoinedExecutor(own, links)
    max_model_len = budget.demand.max_model_len
    scheduler = build_scheduler(
        config.scheduler,
        config.cache,
        groups,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        tiers=off_device.tiers,
        stop_texts=texts.stop_texts,
        num_adapter_slots=config.lora.num_slots,
        can_resample=loaded.can_resample,
        caches_generated=reuses_generated(config),
        num_micro_batches=config.backend.pipeline_parallel_size,
        original=original_context(loaded.program),
    )
    core = EngineCore(
        scheduler,
        worker,
        log=_open_log(config, budget, groups, off_device.tiers, loaded),
        stall_timeout_s=config.observe.stall_timeout,
        kv_meter=KvMeter(
            [layout.block_bytes for layout in loaded.layouts], max_model_len=max_model_len
        ),
        runs_ahead=_uses_async_scheduling(config, loaded.backend),
        num_micro_batches=config.backend.pipeline_parallel_size,
    )
    capacity_tokens = scheduler.blocks.capacity_tokens
    info = EngineInfo(
        loaded.program.vocab_size,
        max_model_len,
        capacity_tokens,
        budget.describe(),
        kv_bytes=budget.num_bytes if memory is None else 0,
        model=model.facts(),
        transfer=off_device.facts,
        original=scheduler.blocks.original,
        cache_facts=off_device.cache_facts,
    )
    return BuiltCore(core, info, worker)


def _block_groups(config: EngineConfig, budget: KvBudget) -> list[BlockGroup]:
    """Describes the KV cache for the scheduler. Host blocks never outnumber device blocks."""
    num_host_blocks = config.cache.swap_space // budget.block_bytes
    return [
        BlockGroup(count, group.spec, min(count, num_host_blocks))
        for count, group in zip(budget.num_blocks, budget.groups, strict=True)
    ]


def _uses_async_scheduling(config: EngineConfig, backend: Backend) -> bool:
    """Decides whether to schedule a step while another one is computed. `derive` has rejected `on`
    if that is impossible.
    """
    requested = config.scheduler.async_scheduling
    if requested != "auto":
        return requested == "on"
    return backend.has_own_device and not get_async_scheduling_conflict(config)


# -- recordings ------------------------------------------------------------------------------------


def _open_log(
    config: EngineConfig,
    budget: KvBudget,
    groups: list[BlockGroup],
    tiers: Tiers | None,
    loaded: LoadedModel,
) -> Recorder | None:
    """Opens the recording and writes its header; returns None if nothing is recorded."""
    if config.observe.record is None:
        return None
    log = Recorder(Path(config.observe.record))
    shown = _without_secrets(config)
    log.write(
        RecordingHeader(
            FORMAT,
            __version__,
            shown.to_options(),
            config.scheduler,
            shown.cache,
            groups,
            block_size=BLOCK_SIZE,
            max_model_len=budget.demand.max_model_len,
            kv_bytes=budget.num_bytes,
            tiers=tiers,
            can_resample=loaded.can_resample,
            original=original_context(loaded.program),
        )
    )
    return log


def _without_secrets(config: EngineConfig) -> EngineConfig:
    """Returns the config without secrets, for a recording."""
    secrets = {
        name: None for name, spec in option_fields().items() if spec.entry.metadata["secret"]
    }
    events = {"kv_events_config": logged_only(config.cache.kv_events_config)}
    return EngineConfig.from_options(**config.to_options() | secrets | events)


def build_executor(header: RecordingHeader, *, model: str | None, report: Report) -> Executor:
    """Builds an executor for a recording's plans: the recorded model (or `model`, a copy of it)
    with the recorded number of KV blocks.
    """
    if header.tiers is not None:
        raise ConfigError(
            "recordings with lower prefix cache tiers cannot be replayed",
            hint="replay it without --execute",
        )
    config = _recorded_config(header, model, kv_cache_memory_bytes=header.kv_bytes)
    opened = open_model(config)
    texts = core_texts(opened, lambda: build_tokenizer(opened))
    return build_core(opened, report, texts).worker


def make_stop_texts(header: RecordingHeader, *, model: str | None) -> MakeStopTexts:
    """Builds the stop string search of a recorded engine. The model is opened only if a beam search
    has stop strings.
    """
    return LazyStopTexts(lambda: build_tokenizer(open_model(_recorded_config(header, model))))


def _recorded_config(header: RecordingHeader, model: str | None, **more: Any) -> EngineConfig:
    options = header.options | {"record": None} | more
    return EngineConfig.from_options(**options | ({"model": model} if model else {}))
