"""The one place that builds an engine out of its parts: checkpoint, Programs, backend, worker,
scheduler, clients, tokenizer.

Everything is chosen by the frozen config; nothing is registered or looked up elsewhere. Reports in
words what it is doing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import __version__
from octavo.backends.base import (
    AsyncBackend,
    Backend,
    BackendOptions,
    Footprint,
    FormatOf,
    OnDemandBackend,
)
from octavo.backends.devices import choose_device, default_backend
from octavo.backends.kv import BLOCK_SIZE, SPLIT_KEYS
from octavo.checkpoint.catalogue import resolve, resolve_header
from octavo.checkpoint.dummy import DummyCheckpoint, DummyWeights
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.checkpoint.open import open_checkpoint, open_header
from octavo.checkpoint.weights import WeightReader, input_units, loaded_formats
from octavo.config.derive import against_async_scheduling, derive
from octavo.config.engine_config import BackendChoice, CacheOptions, EngineConfig
from octavo.config.paths import is_there, user_path
from octavo.config.sizes import format_bytes
from octavo.engine.clients.client import EngineClient, EngineInfo, InProcessClient
from octavo.engine.core import EngineCore
from octavo.engine.front.input_processor import InputProcessor, ModelLimits
from octavo.engine.front.output_processor import OutputProcessor
from octavo.engine.front.stop_texts import LazyStopTexts, MakeStopTexts
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.kv.tier_connector import Tiers
from octavo.engine.kv_meter import KvMeter
from octavo.engine.recording.recorder import FORMAT, Began, Log, NoLog, Recorder, check_writable
from octavo.engine.scheduling.build import build_scheduler, prompt_limits
from octavo.errors import ConfigError, InvalidRequest, UnsupportedModel
from octavo.models.hf_config import ModelInfo, model_info
from octavo.models.registry import build_programs, check_family
from octavo.ports import Checkpoint, Executor, ModelHeader, Profiler, Tokenizer, TokenizerSource
from octavo.program.passes.gather_early import gather_early
from octavo.program.passes.shard import shard
from octavo.program.program import Program
from octavo.program.work import Work, work_of
from octavo.progress import quiet
from octavo.worker.cache_engine import HostShape
from octavo.worker.capacity import Capacity, capacity_of
from octavo.worker.connectors.block_directory import BlockDirectory, check_size, open_root
from octavo.worker.connectors.fingerprint import fingerprint
from octavo.worker.connectors.tiers import TierWorker
from octavo.worker.load_bar import LoadBar
from octavo.worker.loaded_model import LoadedModel, device_memory, host_bytes, request_rows
from octavo.worker.machine import Machine
from octavo.worker.memory import SAFE_SHARE, KvBudget, memory_table
from octavo.worker.ranks.messages import Setup
from octavo.worker.ranks.start import common_budget, common_worker, end_ranks, start_ranks
from octavo.worker.worker import Worker

if TYPE_CHECKING:
    from octavo.backends.torch.ranks import TorchRanks
    from octavo.engine.clients.process import ProcessClient
    from octavo.engine.clients.supervised import SupervisedClient
    from octavo.worker.ranks.other_ranks import OtherRanks
    from octavo.worker.ranks.ranked_worker import RankedWorker

DEFAULT_OFFLOADING_BYTES = 1 << 30
"""Between the device and a prefix_cache_dir; memory that is never written costs nothing."""

Report = Callable[[str], None]
"""Told in words what is being done."""


@dataclass(frozen=True, slots=True)
class Front:
    """What LLM and AsyncLLM work with. `config` has everything derived."""

    config: EngineConfig
    client: EngineClient
    inputs: InputProcessor
    outputs: OutputProcessor
    tokenizer: Tokenizer | None
    generation_config: dict[str, Any]
    profiler: Profiler | None = None
    """Of a core in this process."""

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                "this engine has no tokenizer", hint="start it without skip_tokenizer_init"
            )
        return self.tokenizer


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What a model would take and give, made of its header alone."""

    config: EngineConfig
    info: ModelInfo
    num_parameters: int
    capacity: Capacity
    footprint: Footprint
    work: Work


@dataclass(frozen=True, slots=True)
class Model:
    """An opened model and the config derived from it."""

    config: EngineConfig
    checkpoint: Checkpoint
    info: ModelInfo


def plan_model(config: EngineConfig, *, memory_bytes: int) -> ModelPlan:
    """Loads no weight and starts no engine."""
    header = open_header(resolve_header(config.model.model))
    info = _info_of(header)
    config = _derived(config, info)
    whole = _decoder(config, info, header)
    program = _part(config, header, whole, 0)
    footprint = build_backend(config).footprint(program, _formats(config, header, whole))
    num_parameters = sum(math.prod(weight.shape) for weight in whole.weights)
    capacity = capacity_of(config, program, footprint, memory_bytes)
    return ModelPlan(
        config, info, num_parameters, capacity, footprint, work_of(gather_early(program))
    )


def _formats(config: EngineConfig, header: ModelHeader, whole: Program) -> FormatOf:
    return loaded_formats(header, config.model.dtype, config.model.quantization, whole)


def build_in_process(config: EngineConfig, report: Report) -> Front:
    """The core in this process: `LLM`, tests."""
    model = open_model(config)
    tokenizer = build_tokenizer(model)
    core, info, worker = build_core(model, report, LazyStopTexts(lambda: tokenizer))
    return replace(_front(model, InProcessClient(core, info), info, tokenizer), profiler=worker)


def build_with_process(config: EngineConfig, report: Report) -> Front:
    """The core in a process of its own, which loads while this one reads the tokenizer: `serve`."""
    model = open_model(config)
    client = _start_process(model, report)
    try:
        tokenizer = build_tokenizer(model)
        info = client.wait_until_ready(report)
    except BaseException:
        client.close()
        raise
    return _front(model, client, info, tokenizer)


def _start_process(model: Model, report: Report) -> ProcessClient | SupervisedClient:
    from octavo.engine.clients.process import ProcessClient
    from octavo.engine.clients.supervised import SupervisedClient

    observe = model.config.observe
    options = _options_of(model)

    def start(num_before: int) -> ProcessClient:
        """What an earlier core has recorded stays as it is."""
        record = (
            observe.record
            if observe.record is None or num_before == 0
            else f"{observe.record}.{num_before}"
        )
        return ProcessClient("octavo.wiring:build_core_of_options", options | {"record": record})

    return (
        SupervisedClient(start, stall_timeout_s=observe.stall_timeout, report=report)
        if observe.stall_timeout
        else start(0)
    )


def _options_of(model: Model) -> dict[str, Any]:
    """For another process: the model as it was found."""
    return flat_options(model.config) | {"model": str(model.checkpoint.path)}


def build_core_of_options(options: dict[str, Any], report: Report) -> tuple[EngineCore, EngineInfo]:
    """What the core's own process calls."""
    model = open_model(EngineConfig.from_options(**options))
    core, info, _ = build_core(model, report, LazyStopTexts(lambda: build_tokenizer(model)))
    return core, info


def open_model(config: EngineConfig) -> Model:
    """Finds the model (fetching it where it has to be), reads its headers, derives the config."""
    name = config.model.model
    if config.model.load_format == "dummy":
        checkpoint: Checkpoint = DummyCheckpoint(open_header(resolve_header(name)))
    else:
        checkpoint = open_checkpoint(resolve(name, progress=True))
    info = _info_of(checkpoint)
    return Model(_derived(config, info), checkpoint, info)


def _info_of(header: ModelHeader) -> ModelInfo:
    check_family(header.config)
    return model_info(header.config, header.generation_config)


def _derived(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    backend = config.backend.backend or default_backend()
    return derive(
        config,
        model_context_tokens=info.max_context_tokens,
        num_threads=Machine().num_threads(),
        backend=backend,
    )


def build_core(
    model: Model, report: Report, stop_texts: MakeStopTexts
) -> tuple[EngineCore, EngineInfo, Worker | RankedWorker]:
    """Weights packed, KV cache allocated, scheduler in front; other ranks started, where there are
    any.
    """
    if model.config.observe.record is not None:
        check_writable(Path(model.config.observe.record))
    if model.config.backend.tensor_parallel_size == 1:
        return _build_core(model, report, stop_texts)
    ranks, others = _start_ranks(model)
    try:
        return _build_core(model, report, stop_texts, ranks, others)
    except BaseException as error:
        raise end_ranks(others, error) from None


def _build_core(
    model: Model,
    report: Report,
    stop_texts: MakeStopTexts,
    ranks: TorchRanks | None = None,
    others: OtherRanks | None = None,
) -> tuple[EngineCore, EngineInfo, Worker | RankedWorker]:
    config = model.config
    loaded = load_model(model, report, ranks)
    budget = common_budget(loaded, others)
    if (memory := device_memory(loaded.backend)) is not None:
        report(memory_table(memory, budget.num_bytes))
    report(budget.describe())
    groups = _block_groups(config, budget)
    tiers, tier_worker = _build_tiers(model, loaded, report)
    num_blocks, num_host_blocks = (
        [group.num_blocks for group in groups],
        [group.num_host_blocks for group in groups],
    )
    worker = common_worker(
        loaded, others, num_blocks, num_host_blocks, connector=tier_worker, report=report
    )
    max_model_len = budget.load.max_model_len
    sizes = {"block_size": BLOCK_SIZE, "max_model_len": max_model_len}
    scheduler = build_scheduler(
        config.scheduler, config.cache, groups, **sizes, tiers=tiers, stop_texts=stop_texts
    )
    info = EngineInfo(
        loaded.program.vocab_size,
        max_model_len,
        scheduler.blocks.capacity_tokens,
        budget.describe(),
    )
    log = _log(config, budget, groups, tiers)
    meter = KvMeter([layout.block_bytes for layout in loaded.layouts], max_model_len=max_model_len)
    core = EngineCore(
        scheduler,
        worker,
        log=log,
        stall_timeout_s=config.observe.stall_timeout,
        kv_meter=meter,
        runs_ahead=_runs_ahead(config, loaded.backend),
    )
    return core, info, worker


def _runs_ahead(config: EngineConfig, backend: Backend) -> bool:
    """`on` was refused before where it cannot be."""
    wanted = config.scheduler.async_scheduling
    if wanted != "auto":
        return wanted == "on"
    return (
        isinstance(backend, AsyncBackend)
        and backend.computes_apart
        and not against_async_scheduling(config)
    )


def load_model(model: Model, report: Report, ranks: TorchRanks | None = None) -> LoadedModel:
    """All of it, or what one of several ranks computes."""
    config, whole = model.config, _decoder(model.config, model.info, model.checkpoint)
    own = _part(config, model.checkpoint, whole, 0 if ranks is None else ranks.rank)
    backend = build_backend(config, ranks)
    footprint = backend.footprint(own, _formats(config, model.checkpoint, whole))
    _check_cache(config.cache, backend, footprint)
    rows = request_rows(config, backend.options, own)
    _check_fits(model, backend, own, footprint, report)
    reader = _weight_reader(model, whole, report)
    with LoadBar(reader.load, len(own.weights)) as bar:
        loaded = LoadedModel(config, own, backend, rows, backend.prepare(own, bar.load))
    model.checkpoint.release()
    return loaded


def _part(config: EngineConfig, header: ModelHeader, whole: Program, rank: int) -> Program:
    """What the rank computes of it; ConfigError where it cannot be split over as many ranks as the
    options say.
    """
    num_ranks = config.backend.tensor_parallel_size
    return (
        whole
        if num_ranks == 1
        else shard(whole, rank, num_ranks, input_units(_formats(config, header, whole)))
    )


def _start_ranks(model: Model) -> tuple[TorchRanks, OtherRanks]:
    """This process is the first; what can be refused is, before another is started."""
    config, num_ranks = model.config, model.config.backend.tensor_parallel_size
    _part(config, model.checkpoint, _decoder(config, model.info, model.checkpoint), 0)
    device = choose_device(config.backend.device, num_devices=num_ranks)
    return start_ranks(
        "octavo.wiring:load_rank", _options_of(model) | {"record": None}, num_ranks, device
    )


def load_rank(setup: Setup, started: Callable[[], None]) -> LoadedModel:
    """What the process of another rank calls: meets the first one and loads its part."""
    model = open_model(EngineConfig.from_options(**setup.options))
    device = choose_device(model.config.backend.device, num_devices=setup.num_ranks)
    from octavo.backends.torch.ranks import TorchRanks

    started()
    return load_model(model, quiet, TorchRanks(setup.rank, setup.num_ranks, device, setup.port))


def _log(
    config: EngineConfig, budget: KvBudget, groups: list[BlockGroup], tiers: Tiers | None
) -> Log:
    if config.observe.record is None:
        return NoLog()
    log = Recorder(Path(config.observe.record))
    sizes = {
        "block_size": BLOCK_SIZE,
        "max_model_len": budget.load.max_model_len,
        "kv_bytes": budget.num_bytes,
    }
    log.write(
        Began(
            FORMAT,
            __version__,
            flat_options(config),
            config.scheduler,
            config.cache,
            groups,
            **sizes,
            tiers=tiers,
        )
    )
    return log


def _check_cache(cache: CacheOptions, backend: Backend, footprint: Footprint) -> None:
    """ConfigError, before anything is loaded, where KV cannot be kept as the options have it."""
    if cache.kv_layout == "virtual" and not isinstance(backend, OnDemandBackend):
        raise ConfigError(
            f"kv_layout: virtual is not for the backend {backend.name}",
            hint="leave kv_layout at paged",
        )
    block_bytes = [layout.block_bytes for layout in footprint.kv_layouts]
    _num_slots(cache, sum(block_bytes))
    if cache.prefix_cache_dir is not None:
        check_size(cache.prefix_cache_size, block_bytes)
        open_root(cache.prefix_cache_dir)


def _check_fits(
    model: Model, backend: Backend, own: Program, footprint: Footprint, report: Report
) -> None:
    """ConfigError, before anything is loaded, where it cannot fit."""
    config, name = model.config, str(model.config.model.served_model_name)
    memory = device_memory(backend)
    available_bytes = host_bytes(config) if memory is None else memory.kv_bytes
    if available_bytes is not None:
        share = SAFE_SHARE if memory is None else 1.0
        capacity_of(config, own, footprint, available_bytes, share=share).check(name)
    num_ranks = config.backend.tensor_parallel_size
    each = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    report(f"loading {name}: weights {format_bytes(sum(footprint.weight_bytes.values()))}{each}")


def stop_texts_of(began: Began, *, model: str | None) -> MakeStopTexts:
    """As a recorded engine found stop strings; the model is looked at where a beam search has
    any."""
    options = began.options | {"record": None} | ({"model": model} if model else {})
    return LazyStopTexts(lambda: build_tokenizer(open_model(EngineConfig.from_options(**options))))


def build_executor(began: Began, *, model: str | None, report: Report) -> Executor:
    """What carries out the plans of a recording: the recorded model, or another copy of it, in the
    recorded KV blocks.
    """
    if began.tiers is not None:
        what = (
            "the recording is of an engine with a prefix cache off the device, whose blocks are not"
            " in it"
        )
        raise ConfigError(
            f"{what}: its plans cannot be carried out", hint="replay it without --execute"
        )
    options = (
        began.options
        | {"record": None, "kv_cache_memory_bytes": began.kv_bytes}
        | ({"model": model} if model else {})
    )
    opened = open_model(EngineConfig.from_options(**options))
    _, _, worker = build_core(opened, report, stop_texts_of(began, model=model))
    return worker


def _weight_reader(model: Model, program: Program, report: Report) -> WeightReader | DummyWeights:
    """For 4 bits it is measured first which inputs matter."""
    options = model.config.model
    if options.load_format == "dummy":
        return DummyWeights(_formats(model.config, model.checkpoint, program))
    importance = None
    if options.quantization == "int4":
        from octavo.worker.calibration import input_powers

        report("running the model once to see which of its inputs matter")
        importance = input_powers(
            program,
            WeightReader(model.checkpoint).load,
            context_tokens=model.info.max_context_tokens,
        )
    return WeightReader(model.checkpoint, options.dtype, options.quantization, program, importance)


def build_backend(config: EngineConfig, ranks: TorchRanks | None = None) -> Backend:
    assert config.model.max_model_len is not None, "derive() has set it"
    options = BackendOptions(
        dtype=config.model.dtype,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        shared_prefix_attention=config.cache.shared_prefix_attention,
        num_threads=config.backend.threads,
        max_tokens=config.scheduler.max_num_batched_tokens,
        max_requests=config.scheduler.max_num_seqs,
        max_context=config.model.max_model_len,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        attention_backend=config.backend.attention_backend,
        torch_kernels=config.backend.torch_kernels,
        enforce_eager=config.backend.enforce_eager,
        batch_invariant=config.backend.batch_invariant,
    )
    if config.backend.backend == "reference":
        from octavo.backends.reference import ReferenceBackend

        return ReferenceBackend(options)
    if config.backend.backend == "torch":
        return _torch_backend(options, config.backend, ranks)
    from octavo.backends.native.backend import NativeBackend

    level = config.backend.cpu_level
    return NativeBackend(options, level=None if level == "auto" else level)


def _torch_backend(
    options: BackendOptions, choice: BackendChoice, ranks: TorchRanks | None
) -> Backend:
    """PyTorch is imported here, and nowhere before."""
    device = choose_device(choice.device)
    from octavo.backends.torch.backend import TorchBackend

    return TorchBackend(options, device if ranks is None else str(ranks.device), ranks)


def build_tokenizer(model: Model) -> Tokenizer | None:
    """None with skip_tokenizer_init."""
    options = model.config.model
    if options.skip_tokenizer_init:
        return None
    from octavo.text.tokenizer import load_tokenizer

    return load_tokenizer(_tokenizer_source(model), chat_template=options.chat_template)


def _tokenizer_source(model: Model) -> TokenizerSource:
    """The model's own, or what the option `tokenizer` names: a directory, or a model with a
    tokenizer in it.
    """
    checkpoint, name = model.checkpoint, model.config.model.tokenizer
    if name is None:
        source, where = checkpoint.tokenizer_source(), str(checkpoint.path)
    elif not is_there(path := user_path(name)):
        raise ConfigError(f"tokenizer: got {name!r}, no such file or directory")
    elif path.is_dir():
        source, where = (
            tokenizer_source(path, checkpoint.config, checkpoint.generation_config),
            name,
        )
    else:
        source, where = open_checkpoint(path).tokenizer_source(), name
    if source is None:
        raise ConfigError(
            f"{where}: holds no tokenizer",
            hint="name one by `tokenizer`, or pass token ids with skip_tokenizer_init",
        )
    return source


def flat_options(config: EngineConfig) -> dict[str, Any]:
    """What `EngineConfig.from_options` makes the same config of."""
    sections = [getattr(config, section.name) for section in fields(config)]
    return {
        entry.name: getattr(section, entry.name)
        for section in sections
        for entry in fields(section)
    }


def _decoder(config: EngineConfig, info: ModelInfo, header: ModelHeader) -> Program:
    if info.is_encoder_decoder:
        raise UnsupportedModel(
            f"{config.model.model}: {info.model_type} is an encoder and decoder, only decoders"
            " generate here"
        )
    return build_programs(header.config)["decoder"]


def _block_groups(config: EngineConfig, budget: KvBudget) -> list[BlockGroup]:
    """As the scheduler sees the KV cache; the host never holds more than the device."""
    num_host_blocks = config.cache.swap_space // budget.block_bytes
    return [
        BlockGroup(count, group.window, min(count, num_host_blocks))
        for count, group in zip(budget.num_blocks, budget.groups, strict=True)
    ]


def _build_tiers(
    model: Model, loaded: LoadedModel, report: Report
) -> tuple[Tiers | None, TierWorker | None]:
    """The prefix cache off the device: what its scheduler half is made of, and its worker half,
    where the options ask for them.
    """
    cache, layouts = model.config.cache, loaded.layouts
    block_bytes = [layout.block_bytes for layout in layouts]
    num_slots = _num_slots(cache, sum(block_bytes))
    if not num_slots:
        return None, None
    directory = None if cache.prefix_cache_dir is None else _block_directory(model, loaded)
    worker = TierWorker([HostShape(num_slots, size) for size in block_bytes], directory)
    first = worker.report(wait_s=0.0)
    if first is not None:
        report(
            f"prefix cache in {cache.prefix_cache_dir}: {len(first.found):,} blocks of this model"
        )
    return (
        Tiers(block_bytes, num_slots, directory is not None, cache.prefix_cache_size // 2, first),
        worker,
    )


def _num_slots(cache: CacheOptions, block_bytes: int) -> int:
    wanted = cache.kv_offloading_size
    if wanted is None:
        available = Machine().available_bytes()
        default = (
            DEFAULT_OFFLOADING_BYTES
            if available is None
            else min(DEFAULT_OFFLOADING_BYTES, available // 8)
        )
        wanted = 0 if cache.prefix_cache_dir is None else max(default, block_bytes)
    if wanted < block_bytes and (wanted or cache.prefix_cache_dir is not None):
        raise ConfigError(
            f"kv_offloading_size: got {format_bytes(wanted)}, allowed is at least one block,"
            f" {format_bytes(block_bytes)}"
        )
    return wanted // block_bytes


def _block_directory(model: Model, loaded: LoadedModel) -> BlockDirectory:
    cache, checkpoint = model.config.cache, model.checkpoint
    backend, layouts = loaded.backend, loaded.layouts
    assert cache.prefix_cache_dir is not None
    root = open_root(cache.prefix_cache_dir)
    parts = {
        "octavo": __version__,
        "config": checkpoint.config,
        "options": [model.config.model.dtype, model.config.model.quantization],
        "backend": [backend.name, backend.numerics],
        "groups": list(map(str, loaded.program.groups)),
        "layouts": list(map(str, layouts)),
        "block and split": [BLOCK_SIZE, SPLIT_KEYS],
    }
    return BlockDirectory(
        root,
        fingerprint(parts, checkpoint.weight_files, cache=root),
        max_bytes=cache.prefix_cache_size,
    )


def _front(
    model: Model, client: EngineClient, info: EngineInfo, tokenizer: Tokenizer | None
) -> Front:
    options = model.config.scheduler
    sizes = {
        "max_model_len": info.max_model_len,
        "kv_capacity_tokens": info.kv_capacity_tokens,
        "block_size": BLOCK_SIZE,
    }
    prompts = prompt_limits(options, model.config.cache, **sizes)
    limits = ModelLimits(info.vocab_size, prompts, model.config.model.max_logprobs)
    eos_token_ids = (
        *model.info.eos_token_ids,
        *(tokenizer.eos_token_ids if tokenizer is not None else ()),
    )
    inputs = InputProcessor(
        limits=limits,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        seed=model.config.model.seed,
        scheduling_policy=options.scheduling_policy,
    )
    return Front(
        model.config,
        client,
        inputs,
        OutputProcessor(tokenizer),
        tokenizer,
        model.checkpoint.generation_config,
    )
