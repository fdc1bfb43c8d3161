"""Opens a model (checkpoint, derived config) and loads it (Program, backend, weights, tokenizer).

Handles one process and one rank's weights; `octavo/wiring/ranks.py` starts the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from octavo.api.errors import ConfigError
from octavo.checkpoint.catalogue import resolve_header
from octavo.checkpoint.dummy import DummyCheckpoint, DummyWeights
from octavo.checkpoint.local_models import get_quantization
from octavo.checkpoint.open import describe_tower_file, open_header
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.config.config_hooks import config_hooks
from octavo.config.derive import derive
from octavo.config.engine_config import EngineConfig
from octavo.config.model_kinds import configure_encoder, configure_encoder_decoder
from octavo.config.paths import open_state_home
from octavo.config.sizes import format_bytes
from octavo.engine.clients.client import ModelFacts
from octavo.executor.base import (
    Backend,
    Footprint,
    FormatOf,
    Runnable,
)
from octavo.executor.devices import default_backend
from octavo.frontend.pooling import Pools
from octavo.models.hf_config import ModelInfo, model_info
from octavo.models.registry import build_programs, check_family
from octavo.program.passes.draft_groups import PREFIX, join_groups, whole_groups
from octavo.program.passes.experts import check_experts, share_experts
from octavo.program.passes.features import FEATURES
from octavo.program.passes.shard import shard
from octavo.program.passes.stages import stages
from octavo.program.program import CacheGroup, Program, Weight
from octavo.text.ports import Grammars, Tokenizer
from octavo.utils.progress import Report
from octavo.utils.version import __version__
from octavo.wiring.adapters import adapter_store, with_adapter_sites
from octavo.wiring.backend import backend_with, build_backend
from octavo.wiring.media.build import load_towers, tower_programs, with_towers
from octavo.wiring.model_files import open_model_files
from octavo.wiring.model_hooks import (
    SideProgram,
    model_hooks,
    side_program,
    transform,
    transform_part,
)
from octavo.wiring.pooling_config import set_pooling
from octavo.wiring.pools import get_max_tokens, get_pools, needs_whole_text
from octavo.wiring.rank_connections import RankConnections, get_expert_grid, get_rank_grid
from octavo.wiring.speculation.auto_speculation import with_forced_drafts, with_spec_method
from octavo.wiring.speculation.draft import (
    add_footprints,
    check_draft_program,
    check_same_tokens,
    draft_config,
)
from octavo.wiring.speculation.draft_head import OpenedHead, Reader, describe_unread, open_head
from octavo.wiring.speech_tokens import with_timestamps
from octavo.wiring.tiers import check_tiers
from octavo.wiring.tokenizer_files import find_tokenizer
from octavo.worker.capacity import get_capacity
from octavo.worker.kv_connectors.fingerprint import fingerprint
from octavo.worker.load_bar import LoadBar
from octavo.worker.loaded_model import (
    LoadedDraft,
    LoadedModel,
    device_memory,
    get_host_bytes,
    make_input_batch,
)
from octavo.worker.lora.adapter_numbers import describe_lora_dtype
from octavo.worker.machine import Machine
from octavo.worker.memory import SAFE_SHARE
from octavo.worker.numa import bind, chosen_nodes
from octavo.worker.sampling.draft_sampling import DraftVocabulary
from octavo.worker.stages.stage_link import get_stage


@dataclass(frozen=True, slots=True)
class Model:
    config: EngineConfig
    checkpoint: Checkpoint
    info: ModelInfo

    def program(self) -> Program:
        """Builds the unsharded Program that generates or pools."""
        return self.programs()[0]

    def programs(self) -> Sequence[Program]:
        """Builds all unsharded Programs, the one that generates or pools first."""
        program, *others = build_model_programs(self.info, self.checkpoint)
        return [transform(self.config, self.checkpoint, program), *others]

    def pools(self) -> Pools | None:
        """Returns the model's pooling; None for a generative model."""
        program = self.program()
        return get_pools(self.checkpoint.config, program) if "pooled" in program.outputs else None

    def facts(self) -> ModelFacts:
        """Returns what clients can query about the model."""
        sizes: Counter[str] = Counter()
        for weight, format_ in formats_by_weight(self.config, self.checkpoint, self.programs()):
            sizes[format_] += math.prod(weight.shape)
        path = self.checkpoint.path
        in_files = "" if self.config.model.quantization else get_quantization(path)
        return ModelFacts(
            self.info.model_type,
            sizes.total(),
            in_files or sizes.most_common(1)[0][0],
            sum(file.stat().st_size for file in self.checkpoint.weight_files),
            "gguf" if path.suffix == ".gguf" else "safetensors",
        )

    def options(self) -> dict[str, Any]:
        """Returns options with which another process opens the same files."""
        return self.config.to_options() | {"model": str(self.checkpoint.path)}


def open_model(config: EngineConfig) -> Model:
    """Locates the model (downloading it if necessary), reads its headers and derives the config."""
    name = config.model.model
    if config.model.load_format == "dummy":
        checkpoint: Checkpoint = DummyCheckpoint(open_header(resolve_header(name)))
    else:
        checkpoint = open_model_files(config.model)
    set_pooling(config.model, checkpoint)
    config, info = derive_from(config, checkpoint, checkpoint.names())
    for hooks in model_hooks():
        checkpoint = hooks.open_checkpoint(config, checkpoint)
    return Model(config, checkpoint, info)


def derive_from(
    config: EngineConfig, header: ModelHeader, names: Collection[str] | None = None
) -> tuple[EngineConfig, ModelInfo]:
    """Fills in options that depend on the model or the machine; rejects unknown families.

    `names` are the checkpoint's tensors; None if only its header is known.
    """
    for hooks in model_hooks():
        hooks.add_family(header.config)
    check_family(header.config)
    info = model_info(header.config, header.generation_config)
    context_tokens = info.max_context_tokens
    program = build_model_programs(info, header)[0]
    if "pooled" in program.outputs:
        context_tokens = get_max_tokens(header.config, program, context_tokens)
        get_pools(header.config, program)  # raises an error for unsupported pooling
    if needs_whole_text(program):
        config = configure_encoder(config)
    config = with_spec_method(config, header, program, names)
    if program.input_groups:
        config = configure_encoder_decoder(config, info.max_encoder_tokens)
        if "num_mel_bins" in header.config and config.backend.backend != "torch":
            config = with_timestamps(config, header)
    elif config.model.max_encoder_len is not None:
        raise ConfigError(
            f"max_encoder_len: got {config.model.max_encoder_len}, but the model is not an"
            f" encoder-decoder",
            hint="remove max_encoder_len",
        )
    derived = derive(
        config,
        model_context_tokens=context_tokens,
        num_threads=_num_threads(config),
        backend=config.backend.backend or default_backend(),
    )
    return with_forced_drafts(derived, program), info


def _num_threads(config: EngineConfig) -> int:
    """Returns the cores of the chosen NUMA nodes."""
    machine = Machine()
    return machine.num_threads(chosen_nodes(machine, config.backend.numa_bind_nodes))


def load_model(
    model: Model, report: Report, grammars: Grammars, connections: RankConnections | None = None
) -> LoadedModel:
    """Loads the complete model, or one rank's part of it."""
    config, (whole, *encoders) = model.config, model.programs()
    connections = connections or RankConnections()
    if config.backend.backend == "native":
        options = config.backend
        bind(Machine(), options.numa_bind_nodes, connections.rank, options.num_ranks)
    link, ranks = connections.link, connections.ranks
    own = get_rank_program(config, model.checkpoint, whole, connections.rank, connections.engine)
    own = transform_part(config, model.checkpoint, with_adapter_sites(config, own, whole))
    backend = build_backend(
        config,
        ranks,
        connections.engines,
        checkpoint=model.checkpoint,
        weights_key=_weights_key(model),
    )
    # All checks are done before the first weight is read.
    if config.model.load_format != "dummy":
        check_tensors(model.checkpoint, [whole, *encoders, *tower_programs(model.checkpoint)])
    formats = get_loaded_formats(config, model.checkpoint, whole)
    draft, head = open_draft(model), open_head(config, model.checkpoint, whole)
    drafting: Program | None = None
    if draft is not None:
        own, drafting = join_groups(own, draft.program())
        draft_formats = get_loaded_formats(draft.config, draft.checkpoint, drafting)
    elif head is not None:
        own, drafting = head.add_to(own, get_rank_grid(config, connections.rank))
        formats, draft_formats = head.target_formats(formats, own), head.formats(drafting)
    backend.check(own, formats)
    footprint = backend.footprint(own, formats)
    if drafting is not None:
        backend.check(drafting, draft_formats)
        footprint = add_footprints(footprint, backend.footprint(drafting, draft_formats))
    for encoder in encoders:
        formats = get_loaded_formats(config, model.checkpoint, encoder)
        backend.check(encoder, formats)
        footprint = add_footprints(footprint, backend.footprint(encoder, formats), "encoder")
    make_backend = partial(backend_with, config=config, ranks=None)
    footprint = with_towers(config, model.checkpoint, footprint, backend.options, make_backend)
    _check_cache(config, backend, footprint, whole_groups(whole, own))
    rows = make_input_batch(config, backend.options, own, grammars)
    _check_fits(model, backend, own, footprint, report)
    reader = _weight_reader(model, whole, report)
    joined = reader if head is None else head.target_reader(reader, own)
    side, beside_own = side_program(config, own), None
    if side is not None:
        runnables, beside_own = _load_program_with_side(
            side, model.checkpoint, own, joined, backend
        )
    else:
        runnables = _load_program(model.checkpoint, own, joined, backend)
    for encoder in encoders:
        encoder_reader = _weight_reader(model, encoder, report)
        runnables |= _load_program(model.checkpoint, encoder, encoder_reader, backend)
    adapters = adapter_store(config, (own, whole), runnables, reader.load)
    loaded_draft = None
    if drafting is not None:
        source = head if draft is None else draft
        loaded_draft = _load_draft(source, (own, drafting), backend, report)
    towers = load_towers(config, model.checkpoint, backend.options, make_backend)
    return LoadedModel(
        config,
        {program.name: program for program in (own, *encoders)},
        backend,
        rows,
        runnables,
        adapters=adapters,
        towers=towers,
        draft=loaded_draft,
        side=beside_own,
        link=link,
    )


def _load_draft(
    source: Model | OpenedHead | None,
    programs: tuple[Program, Program],
    backend: Backend,
    report: Report,
) -> LoadedDraft:
    """Loads the draft model or draft head. `programs` are the target's and the draft's."""
    assert source is not None, "the second Program is one of them's"
    target, own = programs
    if isinstance(source, OpenedHead):
        prepared = _load_program(source.own, own, source.reader(own), backend)
        ids = DraftVocabulary(target.vocab_size, own.vocab_size, target.vocab_size, source.offsets)
        checkpoint = None if source.own is source.target else source.own
        features = target.group_index(PREFIX + FEATURES)
        return LoadedDraft(prepared[own.name], ids, features, checkpoint, source.head.reads_keys)
    reader = _weight_reader(source, own, report)
    prepared = _load_program(source.checkpoint, own, reader, backend)
    num_common = min(own.vocab_size, target.vocab_size)
    ids = DraftVocabulary(own.vocab_size, own.vocab_size, num_common)
    return LoadedDraft(prepared[own.name], ids, checkpoint=source.checkpoint)


def _load_program(
    checkpoint: Checkpoint, program: Program, reader: Reader, backend: Backend
) -> dict[str, Runnable]:
    """Loads and packs the weights of a Program; returns it by name."""
    with LoadBar(reader.load, len(program.weights)) as bar:
        runnables = {program.name: backend.prepare_program(program, bar.load)}
    checkpoint.release()
    return runnables


def _load_program_with_side(
    side: SideProgram, checkpoint: Checkpoint, program: Program, reader: Reader, backend: Backend
) -> tuple[dict[str, Runnable], Runnable]:
    """Like `_load_program`; also prepares the side Program from the same weights."""
    with LoadBar(reader.load, len(program.weights)) as bar:
        whole, prepared = backend.prepare_program_with_part(
            program, side.program, bar.load, part_tokens=side.max_tokens
        )
    checkpoint.release()
    return {program.name: whole}, prepared


def open_draft(model: Model) -> Model | None:
    """Opens and checks the draft model; None if the options name none."""
    config = draft_config(model.config)
    if config is None:
        return None
    draft, name = open_model(config), config.model.model
    target_program, program = model.program(), draft.program()
    check_draft_program(target_program, program, name)
    if config.model.load_format != "dummy":
        check_tensors(draft.checkpoint, [program])
    check_same_tokens(
        build_tokenizer(model),
        build_tokenizer(draft),
        (target_program.vocab_size, program.vocab_size),
        name,
    )
    return draft


def build_model_programs(info: ModelInfo, header: ModelHeader) -> Sequence[Program]:
    """Builds the model's Programs: decoder and encoder for an encoder-decoder, else the
    only one.
    """
    programs = build_programs(header.config, every_key=header.has_config_file)
    if not info.is_encoder_decoder:
        return [programs.get("decoder") or programs["encoder"]]
    return [programs["decoder"], programs["encoder"]]


def formats_by_weight(
    config: EngineConfig, header: ModelHeader, programs: Sequence[Program]
) -> Iterator[tuple[Weight, str]]:
    """Yields each weight of the Programs once, with the format in which it is loaded."""
    seen: set[Weight] = set()
    for program in programs:
        format_of = get_loaded_formats(config, header, program)
        for weight in program.weights:
            if weight not in seen:
                yield weight, format_of(weight)
        seen.update(program.weights)


def get_rank_program(
    config: EngineConfig, header: ModelHeader, whole: Program, rank: int, engine: int = 0
) -> Program:
    """Returns one rank's part of a Program. Raises ConfigError if it cannot be split as
    configured.
    """
    options, grid = config.backend, get_rank_grid(config, rank)
    check_experts(whole, options.expert_parallel_size)
    num_engines, of_engines = config.fleet.num_expert_engines, get_expert_grid(config, rank, engine)
    if num_engines > 1:
        check_experts(whole, of_engines.num_experts, "enable_expert_parallel")
    num_stages = options.pipeline_parallel_size
    own = stages(whole, num_stages)[get_stage(rank // grid.num_ranks, num_stages)]
    own = share_experts(own, of_engines.expert_index, of_engines.num_experts, num_engines)
    return shard(own, grid.tensor_index, grid.num_tensor)


def get_loaded_formats(config: EngineConfig, header: ModelHeader, whole: Program) -> FormatOf:
    """Returns a function from weights to the formats in which they are loaded."""
    return loaded_formats(header, config.model.dtype, config.model.quantization, whole)


def _weights_key(model: Model) -> str:
    """Returns a fingerprint of the weights and their packing, for offloaded weights; "" without
    offloading.
    """
    options = model.config.offload
    if options.weights_memory_bytes is None:
        return ""
    assert options.weights_dir is not None, "derive() has checked it"
    config, checkpoint = model.config.model, model.checkpoint
    parts: dict[str, Any] = {
        "octavo": __version__,
        "config": checkpoint.config,
        "options": [config.dtype, config.quantization, config.load_format],
    }
    for hooks in model_hooks():
        parts |= hooks.packing(checkpoint)
    return fingerprint(parts, checkpoint.weight_files, cache=open_state_home()).hex()


def _check_cache(
    config: EngineConfig, backend: Backend, footprint: Footprint, groups: Sequence[CacheGroup]
) -> None:
    """Raises ConfigError if the model or the backend does not support the KV options."""
    if config.cache.kv_layout == "virtual" and not backend.allocates_on_demand:
        raise ConfigError(
            f"kv_layout: virtual is not supported by the {backend.name} backend",
            hint="set kv_layout to paged",
        )
    for hooks in model_hooks():
        hooks.check_backend(config, backend)
    check_tiers(config, footprint.kv_layouts, groups)


def _check_fits(
    model: Model, backend: Backend, own: Program, footprint: Footprint, report: Report
) -> None:
    """Raises ConfigError if the weights and the minimal KV cache do not fit in memory."""
    config, name = model.config, str(model.config.model.served_model_name)
    memory = device_memory(backend)
    available_bytes = get_host_bytes(config) if memory is None else memory.kv_bytes
    if available_bytes is not None:
        share = SAFE_SHARE if memory is None else 1.0
        get_capacity(config, footprint, available_bytes, share=share).check(name)
    num_ranks, num_stages = config.backend.num_stage_ranks, config.backend.pipeline_parallel_size
    where = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    where += f" on the last of {num_stages} stages" if num_stages > 1 else ""
    streamed = (
        f", {format_bytes(footprint.resident_bytes)} of them in memory,"
        f" {format_bytes(footprint.streamed_bytes)} read for each step"
        if footprint.streamed_bytes
        else ""
    )
    for part, num_bytes in footprint.read_in_part.items():
        streamed += (
            f", of {format_bytes(num_bytes)} of {part} those that a step uses and memory has not"
        )
    of_extensions = [line for hooks in config_hooks() for line in hooks.describe(config)]
    unread = describe_unread(config.scheduler.spec_method, model.checkpoint)
    larger = _describe_larger(model, sum(footprint.weight_bytes.values()))
    adapters = describe_lora_dtype(config.lora.lora_dtype) if config.lora.enable_lora else ""
    tower = describe_tower_file(model.checkpoint)
    for line in filter(None, (*of_extensions, adapters, unread, larger, tower)):
        report(line)
    report(
        f"loading {name}: weights {format_bytes(sum(footprint.weight_bytes.values()))}{where}"
        f"{streamed}"
    )


def _describe_larger(model: Model, weight_bytes: int) -> str | None:
    file_bytes = sum(file.stat().st_size for file in model.checkpoint.weight_files)
    if model.config.model.quantization is None or weight_bytes <= file_bytes:
        return None
    return (
        f"WARNING: --quantization {model.config.model.quantization} makes the weights larger:"
        f" {format_bytes(weight_bytes)} in memory, {format_bytes(file_bytes)} in the file, whose"
        " weights are quantized already; remove the option"
    )


def _weight_reader(model: Model, program: Program, report: Report) -> WeightReader | DummyWeights:
    """Builds the reader of the weights; for 4 bits it first measures the inputs' importance."""
    options = model.config.model
    if options.load_format == "dummy":
        return DummyWeights(get_loaded_formats(model.config, model.checkpoint, program))
    importance = None
    if options.quantization == "int4":
        from octavo.worker.calibration import input_powers

        report("profiling the model's inputs")
        importance = input_powers(
            program,
            WeightReader(model.checkpoint).load,
            context_tokens=model.info.max_context_tokens,
        )
    return WeightReader(model.checkpoint, options.dtype, options.quantization, program, importance)


def build_tokenizer(model: Model) -> Tokenizer | None:
    """Loads the tokenizer; None with skip_tokenizer_init.

    With `--tokenizer`, the model's own end tokens also end a text.
    """
    options = model.config.model
    if options.skip_tokenizer_init:
        return None
    from octavo.text.parsers.choice import choose_formats
    from octavo.text.tokenizer import load_tokenizer

    source = find_tokenizer(options, model.checkpoint)
    ends = tuple(dict.fromkeys([*model.info.eos_token_ids, *source.eos_token_ids]))
    tokenizer = load_tokenizer(
        replace(source, eos_token_ids=ends),
        chat_template=options.chat_template,
        strict=options.strict_files,
    )
    choose_formats(tokenizer.chat_template, options.tool_call_parser, options.reasoning_parser)
    return tokenizer
