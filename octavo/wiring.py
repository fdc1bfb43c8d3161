"""The one place that builds an engine out of its parts: checkpoint, Programs, backend, worker, scheduler, clients, tokenizer.

Everything is chosen by the frozen config; nothing is registered or looked up elsewhere. Reports in words what it is doing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import __version__
from octavo.backends.base import (
    BLOCK_SIZE,
    SPLIT_KEYS,
    AsyncBackend,
    Backend,
    BackendOptions,
    DeviceBackend,
    DeviceMemory,
    Footprint,
    KvCache,
    KvLayout,
    OnDemandBackend,
)
from octavo.backends.devices import choose_device, default_backend
from octavo.checkpoint.catalogue import resolve, resolve_header
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.checkpoint.open import open_checkpoint, open_header
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.config.derive import against_async_scheduling, derive
from octavo.config.engine_config import BackendChoice, CacheOptions, EngineConfig
from octavo.config.paths import is_there, user_path
from octavo.config.sizes import format_bytes
from octavo.engine.block_pool import BlockGroup
from octavo.engine.build_scheduler import build_scheduler, prompt_limits
from octavo.engine.client import EngineClient, EngineInfo, InProcessClient
from octavo.engine.connector import Tiers
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import InputProcessor, ModelLimits
from octavo.engine.kv_meter import KvMeter
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.recorder import FORMAT, Began, Log, NoLog, Recorder, check_writable
from octavo.engine.stop_texts import LazyStopTexts, MakeStopTexts
from octavo.errors import ConfigError, InvalidRequest, UnsupportedModel
from octavo.models.hf_config import ModelInfo, model_info
from octavo.models.registry import build_programs, check_family
from octavo.ports import Checkpoint, Executor, ModelHeader, Profiler, Tokenizer, TokenizerSource
from octavo.program.program import Program
from octavo.program.work import Work, work_of
from octavo.worker.block_places import BlockPlaces, PagedPlaces, RangeShape, VirtualPlaces, check_addressable, describe_ranges
from octavo.worker.cache_engine import CacheEngine, HostShape
from octavo.worker.calibration import input_powers
from octavo.worker.capacity import Capacity, capacity_of
from octavo.worker.connectors.block_directory import BlockDirectory, check_size, open_root
from octavo.worker.connectors.fingerprint import fingerprint
from octavo.worker.connectors.tiers import TierWorker
from octavo.worker.load_bar import LoadBar
from octavo.worker.machine import Machine
from octavo.worker.memory import SAFE_SHARE, GroupSize, KvBudget, Load, memory_table, plan_kv
from octavo.worker.request_rows import RequestRows
from octavo.worker.worker import Worker

if TYPE_CHECKING:
    from octavo.engine.process_client import ProcessClient
    from octavo.engine.supervised_client import SupervisedClient

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
            raise InvalidRequest("this engine has no tokenizer", hint="start it without skip_tokenizer_init")
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
    program = _decoder(config, info, header)
    footprint = _footprint(config, build_backend(config), header, program)
    num_parameters = sum(math.prod(weight.shape) for weight in program.weights)
    return ModelPlan(config, info, num_parameters, capacity_of(config, program, footprint, memory_bytes), footprint, work_of(program))


def _footprint(config: EngineConfig, backend: Backend, header: ModelHeader, program: Program) -> Footprint:
    return backend.footprint(program, loaded_formats(header, config.model.dtype, config.model.quantization, program))


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
    from octavo.engine.process_client import ProcessClient
    from octavo.engine.supervised_client import SupervisedClient

    observe = model.config.observe
    options = flat_options(model.config) | {"model": str(model.checkpoint.path)}

    def start(num_before: int) -> ProcessClient:
        """What an earlier core has recorded stays as it is."""
        record = observe.record if observe.record is None or num_before == 0 else f"{observe.record}.{num_before}"
        return ProcessClient("octavo.wiring:build_core_of_options", options | {"record": record})

    return SupervisedClient(start, stall_timeout_s=observe.stall_timeout, report=report) if observe.stall_timeout else start(0)


def build_core_of_options(options: dict[str, Any], report: Report) -> tuple[EngineCore, EngineInfo]:
    """What the core's own process calls."""
    model = open_model(EngineConfig.from_options(**options))
    core, info, _ = build_core(model, report, LazyStopTexts(lambda: build_tokenizer(model)))
    return core, info


def open_model(config: EngineConfig) -> Model:
    """Finds the model (fetching it where it has to be), reads its headers, derives the config."""
    checkpoint = open_checkpoint(resolve(config.model.model, progress=True))
    info = _info_of(checkpoint)
    return Model(_derived(config, info), checkpoint, info)


def _info_of(header: ModelHeader) -> ModelInfo:
    check_family(header.config)
    return model_info(header.config, header.generation_config)


def _derived(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    backend = config.backend.backend or default_backend()
    return derive(config, model_context_tokens=info.max_context_tokens, num_threads=Machine().num_threads(), backend=backend)


def build_core(model: Model, report: Report, stop_texts: MakeStopTexts) -> tuple[EngineCore, EngineInfo, Worker]:
    """Weights packed, KV cache allocated, scheduler in front."""
    config = model.config
    if config.observe.record is not None:
        check_writable(Path(config.observe.record))
    program = _decoder(config, model.info, model.checkpoint)
    backend = build_backend(config)
    footprint = _footprint(config, backend, model.checkpoint, program)
    _check_cache(config.cache, backend, footprint)
    _check_fits(model, backend, program, footprint, report)
    reader = _weight_reader(model, program, report)
    with LoadBar(reader.load, len(program.weights)) as bar:
        runnable = backend.prepare(program, bar.load)
    memory = _device_memory(backend)
    budget = _kv_budget(config, backend, program, memory)
    if memory is not None:
        report(memory_table(memory, budget.num_bytes))
    report(budget.describe())
    max_model_len = budget.load.max_model_len
    rows = _request_rows(backend.options, max_model_len, program)
    groups = _block_groups(config, budget)
    kv, places = _kv_memory(config, backend, program, groups, report)
    layouts = [backend.kv_layout(group) for group in program.groups]
    host = [HostShape(group.num_host_blocks, layout.block_bytes) for group, layout in zip(groups, layouts, strict=True)]
    tiers, tier_worker = _build_tiers(model, backend, layouts, program, report)
    worker = Worker(runnable, CacheEngine(kv, host, tier_worker, places), rows, close=backend.close)
    sizes = {"block_size": BLOCK_SIZE, "max_model_len": max_model_len}
    scheduler = build_scheduler(config.scheduler, config.cache, groups, **sizes, tiers=tiers, stop_texts=stop_texts)
    info = EngineInfo(program.vocab_size, max_model_len, scheduler.blocks.capacity_tokens, budget.describe())
    log = _log(config, budget, groups, tiers)
    meter = KvMeter([layout.block_bytes for layout in layouts], max_model_len=max_model_len)
    core = EngineCore(
        scheduler,
        worker,
        log=log,
        stall_timeout_s=config.observe.stall_timeout,
        kv_meter=meter,
        runs_ahead=_runs_ahead(config, backend),
    )
    return core, info, worker


def _request_rows(options: BackendOptions, max_model_len: int, program: Program) -> RequestRows:
    sizes = {"num_groups": len(program.groups), "vocab_size": program.vocab_size}
    try:
        return RequestRows(max_rows=options.max_rows, max_model_len=max_model_len, **sizes)
    except MemoryError:
        what = f"max_num_seqs: got {options.max_requests:,}, but the token ids of so many requests of {max_model_len:,} tokens"
        raise ConfigError(f"{what} take more memory than there is", hint="lower max_num_seqs or max_model_len") from None


def _runs_ahead(config: EngineConfig, backend: Backend) -> bool:
    """`on` was refused before where it cannot be."""
    wanted = config.scheduler.async_scheduling
    if wanted != "auto":
        return wanted == "on"
    return isinstance(backend, AsyncBackend) and backend.computes_apart and not against_async_scheduling(config)


def _kv_memory(
    config: EngineConfig, backend: Backend, program: Program, groups: Sequence[BlockGroup], report: Report
) -> tuple[KvCache, BlockPlaces]:
    """The device's memory for KV, and where in it blocks lie, in the layout that the options name."""
    if config.cache.kv_layout == "paged":
        return backend.allocate(program.groups, [group.num_blocks for group in groups]), PagedPlaces()
    assert isinstance(backend, OnDemandBackend), "_check_cache has seen to it"
    assert config.model.max_model_len is not None, "derive() has set it"
    num_rows, context_blocks = config.scheduler.max_num_seqs, -(-config.model.max_model_len // BLOCK_SIZE)
    ranges = [
        RangeShape.of(group.num_blocks, context_blocks, backend.kv_pieces(spec), spec.num_layers)
        for spec, group in zip(program.groups, groups, strict=True)
    ]
    check_addressable(ranges, num_rows=num_rows)
    report(describe_ranges(ranges, num_rows=num_rows))
    kv = backend.allocate_on_demand(program.groups, [num_rows * shape.num_blocks for shape in ranges])
    return kv, VirtualPlaces(kv, ranges, num_rows=num_rows)


def _log(config: EngineConfig, budget: KvBudget, groups: list[BlockGroup], tiers: Tiers | None) -> Log:
    if config.observe.record is None:
        return NoLog()
    log = Recorder(Path(config.observe.record))
    sizes = {"block_size": BLOCK_SIZE, "max_model_len": budget.load.max_model_len, "kv_bytes": budget.num_bytes}
    log.write(Began(FORMAT, __version__, flat_options(config), config.scheduler, config.cache, groups, **sizes, tiers=tiers))
    return log


def _check_cache(cache: CacheOptions, backend: Backend, footprint: Footprint) -> None:
    """ConfigError, before anything is loaded, where KV cannot be kept as the options have it."""
    if cache.kv_layout == "virtual" and not isinstance(backend, OnDemandBackend):
        raise ConfigError(f"kv_layout: virtual is not for the backend {backend.name}", hint="leave kv_layout at paged")
    block_bytes = [layout.block_bytes for layout in footprint.kv_layouts]
    _num_slots(cache, sum(block_bytes))
    if cache.prefix_cache_dir is not None:
        check_size(cache.prefix_cache_size, block_bytes)
        open_root(cache.prefix_cache_dir)


def _check_fits(model: Model, backend: Backend, program: Program, footprint: Footprint, report: Report) -> None:
    """ConfigError, before anything is loaded, where it cannot fit."""
    config, name = model.config, str(model.config.model.served_model_name)
    memory = _device_memory(backend)
    available_bytes = Machine().available_bytes() if memory is None else memory.kv_bytes
    if available_bytes is not None:
        share = SAFE_SHARE if memory is None else 1.0
        capacity_of(config, program, footprint, available_bytes, share=share).check(name)
    report(f"loading {name}: weights {format_bytes(sum(footprint.weight_bytes.values()))}")


def stop_texts_of(began: Began, *, model: str | None) -> MakeStopTexts:
    """As a recorded engine found stop strings; the model is looked at where a beam search has any."""
    options = began.options | {"record": None} | ({"model": model} if model else {})
    return LazyStopTexts(lambda: build_tokenizer(open_model(EngineConfig.from_options(**options))))


def build_executor(began: Began, *, model: str | None, report: Report) -> Executor:
    """What carries out the plans of a recording: the recorded model, or another copy of it, in the recorded KV blocks."""
    if began.tiers is not None:
        what = "the recording is of an engine with a prefix cache off the device, whose blocks are not in it"
        raise ConfigError(f"{what}: its plans cannot be carried out", hint="replay it without --execute")
    options = began.options | {"record": None, "kv_cache_memory_bytes": began.kv_bytes} | ({"model": model} if model else {})
    opened = open_model(EngineConfig.from_options(**options))
    _, _, worker = build_core(opened, report, stop_texts_of(began, model=model))
    return worker


def _weight_reader(model: Model, program: Program, report: Report) -> WeightReader:
    """For 4 bits it is measured first which inputs matter."""
    options = model.config.model
    importance = None
    if options.quantization == "int4":
        report("running the model once to see which of its inputs matter")
        importance = input_powers(program, WeightReader(model.checkpoint).load, context_tokens=model.info.max_context_tokens)
    return WeightReader(model.checkpoint, options.dtype, options.quantization, program, importance)


def build_backend(config: EngineConfig) -> Backend:
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
        return _torch_backend(options, config.backend)
    from octavo.backends.native.backend import NativeBackend

    return NativeBackend(options)


def _torch_backend(options: BackendOptions, choice: BackendChoice) -> Backend:
    """PyTorch is imported here, and nowhere before."""
    device = choose_device(choice.device)
    from octavo.backends.torch.backend import TorchBackend

    return TorchBackend(options, device)


def build_tokenizer(model: Model) -> Tokenizer | None:
    """None with skip_tokenizer_init."""
    options = model.config.model
    if options.skip_tokenizer_init:
        return None
    from octavo.text.tokenizer import load_tokenizer

    return load_tokenizer(_tokenizer_source(model), chat_template=options.chat_template)


def _tokenizer_source(model: Model) -> TokenizerSource:
    """The model's own, or what the option `tokenizer` names: a directory, or a model with a tokenizer in it."""
    checkpoint, name = model.checkpoint, model.config.model.tokenizer
    if name is None:
        source, where = checkpoint.tokenizer_source(), str(checkpoint.path)
    elif not is_there(path := user_path(name)):
        raise ConfigError(f"tokenizer: got {name!r}, no such file or directory")
    elif path.is_dir():
        source, where = tokenizer_source(path, checkpoint.config, checkpoint.generation_config), name
    else:
        source, where = open_checkpoint(path).tokenizer_source(), name
    if source is None:
        raise ConfigError(f"{where}: holds no tokenizer", hint="name one by `tokenizer`, or pass token ids with skip_tokenizer_init")
    return source


def flat_options(config: EngineConfig) -> dict[str, Any]:
    """What `EngineConfig.from_options` makes the same config of."""
    sections = [getattr(config, section.name) for section in fields(config)]
    return {entry.name: getattr(section, entry.name) for section in sections for entry in fields(section)}


def _decoder(config: EngineConfig, info: ModelInfo, header: ModelHeader) -> Program:
    if info.is_encoder_decoder:
        raise UnsupportedModel(f"{config.model.model}: {info.model_type} is an encoder and decoder, only decoders generate here")
    return build_programs(header.config)["decoder"]


def _device_memory(backend: Backend) -> DeviceMemory | None:
    return backend.memory() if isinstance(backend, DeviceBackend) else None


def _kv_budget(config: EngineConfig, backend: Backend, program: Program, memory: DeviceMemory | None) -> KvBudget:
    """Of the machine's memory a safe share; of a device's own all that is left of its."""
    assert config.model.max_model_len is not None, "derive() has set it"
    options = config.scheduler
    return plan_kv(
        [GroupSize(backend.kv_layout(group).block_bytes, group.window if config.cache.kv_cache else None) for group in program.groups],
        Load(config.model.max_model_len, options.max_num_seqs, options.max_num_batched_tokens),
        wanted_bytes=config.cache.kv_cache_memory_bytes,
        available_bytes=Machine().available_bytes() if memory is None else memory.kv_bytes,
        share=SAFE_SHARE if memory is None else 1.0,
    )


def _block_groups(config: EngineConfig, budget: KvBudget) -> list[BlockGroup]:
    """As the scheduler sees the KV cache; the host never holds more than the device."""
    num_host_blocks = config.cache.swap_space // budget.block_bytes
    return [
        BlockGroup(count, group.window, min(count, num_host_blocks)) for count, group in zip(budget.num_blocks, budget.groups, strict=True)
    ]


def _build_tiers(
    model: Model, backend: Backend, layouts: Sequence[KvLayout], program: Program, report: Report
) -> tuple[Tiers | None, TierWorker | None]:
    """The prefix cache off the device: what its scheduler half is made of, and its worker half, where the options ask for them."""
    cache = model.config.cache
    block_bytes = [layout.block_bytes for layout in layouts]
    num_slots = _num_slots(cache, sum(block_bytes))
    if not num_slots:
        return None, None
    directory = None if cache.prefix_cache_dir is None else _block_directory(model, backend, layouts, program)
    worker = TierWorker([HostShape(num_slots, size) for size in block_bytes], directory)
    first = worker.report(wait_s=0.0)
    if first is not None:
        report(f"prefix cache in {cache.prefix_cache_dir}: {len(first.found):,} blocks of this model")
    return Tiers(block_bytes, num_slots, directory is not None, cache.prefix_cache_size // 2, first), worker


def _num_slots(cache: CacheOptions, block_bytes: int) -> int:
    wanted = cache.kv_offloading_size
    if wanted is None:
        available = Machine().available_bytes()
        default = DEFAULT_OFFLOADING_BYTES if available is None else min(DEFAULT_OFFLOADING_BYTES, available // 8)
        wanted = 0 if cache.prefix_cache_dir is None else max(default, block_bytes)
    if wanted < block_bytes and (wanted or cache.prefix_cache_dir is not None):
        raise ConfigError(f"kv_offloading_size: got {format_bytes(wanted)}, allowed is at least one block, {format_bytes(block_bytes)}")
    return wanted // block_bytes


def _block_directory(model: Model, backend: Backend, layouts: Sequence[KvLayout], program: Program) -> BlockDirectory:
    cache, checkpoint = model.config.cache, model.checkpoint
    assert cache.prefix_cache_dir is not None
    root = open_root(cache.prefix_cache_dir)
    parts = {
        "octavo": __version__,
        "config": checkpoint.config,
        "options": [model.config.model.dtype, model.config.model.quantization],
        "backend": [backend.name, backend.numerics],
        "groups": list(map(str, program.groups)),
        "layouts": list(map(str, layouts)),
        "block and split": [BLOCK_SIZE, SPLIT_KEYS],
    }
    return BlockDirectory(root, fingerprint(parts, checkpoint.weight_files, cache=root), max_bytes=cache.prefix_cache_size)


def _front(model: Model, client: EngineClient, info: EngineInfo, tokenizer: Tokenizer | None) -> Front:
    options = model.config.scheduler
    sizes = {"max_model_len": info.max_model_len, "kv_capacity_tokens": info.kv_capacity_tokens, "block_size": BLOCK_SIZE}
    prompts = prompt_limits(options, model.config.cache, **sizes)
    limits = ModelLimits(info.vocab_size, prompts, model.config.model.max_logprobs)
    eos_token_ids = (*model.info.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer is not None else ()))
    inputs = InputProcessor(
        limits=limits,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        seed=model.config.model.seed,
        scheduling_policy=options.scheduling_policy,
    )
    return Front(model.config, client, inputs, OutputProcessor(tokenizer), tokenizer, model.checkpoint.generation_config)
