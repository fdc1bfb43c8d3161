"""Opens a model and loads it: the checkpoint and the config derived from it, its Program, its
backend, its tokenizer.

Knows one process and one rank's part of the weights; who starts the others is
`octavo/wiring/ranks.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.backends.base import Backend, BackendOptions, Footprint, FormatOf, OnDemandBackend
from octavo.backends.devices import choose_device, default_backend
from octavo.checkpoint.catalogue import resolve, resolve_header
from octavo.checkpoint.dummy import DummyCheckpoint, DummyWeights
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.checkpoint.open import open_checkpoint, open_header
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.weights import WeightReader, input_units, loaded_formats
from octavo.config.derive import derive, for_whole_texts
from octavo.config.engine_config import BackendChoice, CacheOptions, EngineConfig
from octavo.config.paths import is_there, user_path
from octavo.config.sizes import format_bytes
from octavo.engine.clients.client import ModelFacts
from octavo.engine.front.pooling_inputs import Pools
from octavo.errors import ConfigError, UnsupportedModel
from octavo.models.hf_config import ModelInfo, model_info
from octavo.models.registry import build_programs, check_family
from octavo.ports import Checkpoint, Grammars, ModelHeader, Tokenizer, TokenizerSource
from octavo.program.passes.shard import shard
from octavo.program.program import Program
from octavo.progress import Report
from octavo.text.grammar.lazy import GrammarSetup, LazyGrammars
from octavo.wiring.pools import most_tokens, pools_of, reads_whole_texts
from octavo.wiring.tiers import check_tiers
from octavo.worker.capacity import capacity_of
from octavo.worker.load_bar import LoadBar
from octavo.worker.loaded_model import LoadedModel, device_memory, host_bytes, request_rows
from octavo.worker.machine import Machine
from octavo.worker.memory import SAFE_SHARE

if TYPE_CHECKING:
    from octavo.backends.torch.ranks import TorchRanks


@dataclass(frozen=True, slots=True)
class Model:
    """An opened model and the config derived from it."""

    config: EngineConfig
    checkpoint: Checkpoint
    info: ModelInfo

    def program(self) -> Program:
        """Builds the whole Program that its requests run."""
        return program_of(self.config, self.info, self.checkpoint)

    def pools(self) -> Pools | None:
        """Returns what the model makes of a text besides generating; None where it generates."""
        program = self.program()
        return pools_of(self.checkpoint.config, program) if "pooled" in program.outputs else None

    def facts(self) -> ModelFacts:
        """Returns what clients may be told of it."""
        whole = self.program()
        format_of = formats_of(self.config, self.checkpoint, whole)
        sizes: Counter[str] = Counter()
        for weight in whole.weights:
            sizes[format_of(weight)] += math.prod(weight.shape)
        path = self.checkpoint.path
        files = [path] if path.is_file() else path.glob("*.safetensors")
        return ModelFacts(
            self.info.model_type,
            sizes.total(),
            sizes.most_common(1)[0][0],
            sum(file.stat().st_size for file in files),
            "gguf" if path.suffix == ".gguf" else "safetensors",
        )

    def options(self) -> dict[str, Any]:
        """Returns the options with which another process opens the same model, where it was found
        here.
        """
        return self.config.to_options() | {"model": str(self.checkpoint.path)}


def open_model(config: EngineConfig) -> Model:
    """Finds the model (fetching it where it is not here), reads its headers, derives the config."""
    name = config.model.model
    if config.model.load_format == "dummy":
        checkpoint: Checkpoint = DummyCheckpoint(open_header(resolve_header(name)))
    else:
        checkpoint = open_checkpoint(resolve(name, progress=True))
    config, info = derive_from(config, checkpoint)
    return Model(config, checkpoint, info)


def derive_from(config: EngineConfig, header: ModelHeader) -> tuple[EngineConfig, ModelInfo]:
    """Fills in the options that depend on the model or the machine; refuses an unknown family."""
    check_family(header.config)
    info = model_info(header.config, header.generation_config)
    context_tokens = info.max_context_tokens
    program = program_of(config, info, header)
    if "pooled" in program.outputs:
        context_tokens = most_tokens(header.config, program, context_tokens)
    if reads_whole_texts(program):
        config = for_whole_texts(config)
    derived = derive(
        config,
        model_context_tokens=context_tokens,
        num_threads=Machine().num_threads(),
        backend=config.backend.backend or default_backend(),
    )
    return derived, info


def load_model(
    model: Model, report: Report, grammars: Grammars, ranks: TorchRanks | None = None
) -> LoadedModel:
    """Loads the whole model, or what one of several ranks computes."""
    config, whole = model.config, model.program()
    own = part_of(config, model.checkpoint, whole, 0 if ranks is None else ranks.rank)
    backend = build_backend(config, ranks)
    # Everything that can be refused is refused before the first weight is read.
    if config.model.load_format != "dummy":
        check_tensors(model.checkpoint, [whole])
    formats = formats_of(config, model.checkpoint, whole)
    backend.check(own, formats)
    footprint = backend.footprint(own, formats)
    _check_cache(config.cache, backend, footprint)
    rows = request_rows(config, backend.options, own, grammars)
    _check_fits(model, backend, own, footprint, report)
    reader = _weight_reader(model, whole, report)
    with LoadBar(reader.load, len(own.weights)) as bar:
        runnables = {own.name: backend.prepare(own, bar.load)}
    model.checkpoint.release()
    return LoadedModel(config, {own.name: own}, backend, rows, runnables)


def program_of(config: EngineConfig, info: ModelInfo, header: ModelHeader) -> Program:
    """Builds the Program that the model's requests run: its decoder, or an encoder that pools;
    UnsupportedModel where the engine runs neither.
    """
    if info.is_encoder_decoder:
        raise UnsupportedModel(
            f"{config.model.model}: {info.model_type} is an encoder and decoder; decoders"
            " and encoders run here"
        )
    programs = build_programs(header.config, every_key=header.has_config_file)
    return programs.get("decoder") or programs["encoder"]


def part_of(config: EngineConfig, header: ModelHeader, whole: Program, rank: int) -> Program:
    """Returns what one rank computes of a Program; ConfigError where it cannot be split over as
    many ranks as the options name.
    """
    num_ranks = config.backend.tensor_parallel_size
    if num_ranks == 1:
        return whole
    return shard(whole, rank, num_ranks, input_units(formats_of(config, header, whole)))


def formats_of(config: EngineConfig, header: ModelHeader, whole: Program) -> FormatOf:
    """Tells how each weight will be stored once it is loaded."""
    return loaded_formats(header, config.model.dtype, config.model.quantization, whole)


def build_backend(config: EngineConfig, ranks: TorchRanks | None = None) -> Backend:
    """Makes the backend that the options name; BackendUnavailable where it cannot run here."""
    options = _backend_options(config)
    if config.backend.backend == "reference":
        from octavo.backends.reference.backend import ReferenceBackend

        return ReferenceBackend(options)
    if config.backend.backend == "torch":
        return _torch_backend(options, config.backend, ranks)
    from octavo.backends.native.backend import NativeBackend

    level = config.backend.cpu_level
    return NativeBackend(options, level=None if level == "auto" else level)


def _backend_options(config: EngineConfig) -> BackendOptions:
    assert config.model.max_model_len is not None, "derive() has set it"
    return BackendOptions(
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


def _torch_backend(
    options: BackendOptions, choice: BackendChoice, ranks: TorchRanks | None
) -> Backend:
    """Makes the torch backend, after `choose_device` has found PyTorch: it is imported nowhere
    before.
    """
    device = choose_device(choice.device)
    from octavo.backends.torch.backend import TorchBackend

    return TorchBackend(options, device if ranks is None else str(ranks.device), ranks)


def _check_cache(cache: CacheOptions, backend: Backend, footprint: Footprint) -> None:
    """Raises ConfigError where KV cannot be kept as the options say."""
    if cache.kv_layout == "virtual" and not isinstance(backend, OnDemandBackend):
        raise ConfigError(
            f"kv_layout: virtual is not for the backend {backend.name}",
            hint="leave kv_layout at paged",
        )
    check_tiers(cache, [layout.block_bytes for layout in footprint.kv_layouts])


def _check_fits(
    model: Model, backend: Backend, own: Program, footprint: Footprint, report: Report
) -> None:
    """Raises ConfigError where the weights and the least KV cache do not fit into the memory."""
    config, name = model.config, str(model.config.model.served_model_name)
    memory = device_memory(backend)
    available_bytes = host_bytes(config) if memory is None else memory.kv_bytes
    if available_bytes is not None:
        share = SAFE_SHARE if memory is None else 1.0
        capacity_of(config, footprint, available_bytes, share=share).check(name)
    num_ranks = config.backend.tensor_parallel_size
    each = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    report(f"loading {name}: weights {format_bytes(sum(footprint.weight_bytes.values()))}{each}")


def _weight_reader(model: Model, program: Program, report: Report) -> WeightReader | DummyWeights:
    """Makes the reader of the weights; for 4 bits it first measures which inputs matter."""
    options = model.config.model
    if options.load_format == "dummy":
        return DummyWeights(formats_of(model.config, model.checkpoint, program))
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


def build_tokenizer(model: Model) -> Tokenizer | None:
    """Loads the tokenizer; None with skip_tokenizer_init."""
    options = model.config.model
    if options.skip_tokenizer_init:
        return None
    from octavo.text.parsers.choice import formats_of
    from octavo.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(_tokenizer_source(model), chat_template=options.chat_template)
    formats_of(tokenizer.chat_template, options.tool_call_parser, options.reasoning_parser)
    return tokenizer


def end_token_ids(info: ModelInfo, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the tokens that end an answer, by the model's config and by its tokenizer."""
    of_tokenizer = () if tokenizer is None else tokenizer.eos_token_ids
    return (*info.eos_token_ids, *of_tokenizer)


def lazy_grammars(model: Model, read: Callable[[], Tokenizer | None]) -> LazyGrammars:
    """Makes what compiles the model's grammars; `read` gives its tokenizer."""
    # What is kept here keeps no checkpoint: its file would stay mapped as long as the engine lives.
    info = model.info

    def setup() -> GrammarSetup:
        tokenizer = read()
        assert tokenizer is not None, "the front refuses grammars where there is no tokenizer"
        return GrammarSetup(tokenizer, info.vocab_size, end_token_ids(info, tokenizer))

    return LazyGrammars(setup)


def _tokenizer_source(model: Model) -> TokenizerSource:
    """Finds the model's own tokenizer, or the one that the option `tokenizer` names: a directory,
    or a model with a tokenizer in it.
    """
    checkpoint, name = model.checkpoint, model.config.model.tokenizer
    if name is None:
        source, where = checkpoint.tokenizer_source(), str(checkpoint.path)
    elif not is_there(path := user_path(name)):
        raise ConfigError(f"tokenizer: got {name!r}, no such file or directory")
    elif path.is_dir():
        source = tokenizer_source(path, checkpoint.config, checkpoint.generation_config)
        where = name
    else:
        source, where = open_checkpoint(path).tokenizer_source(), name
    if source is None:
        raise ConfigError(
            f"{where}: holds no tokenizer",
            hint="name one by `tokenizer`, or pass token ids with skip_tokenizer_init",
        )
    return source
