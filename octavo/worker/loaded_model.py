"""A loaded model, or one rank's part of it: plans its KV blocks and builds its worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from octavo.api.errors import ConfigError
from octavo.checkpoint.ports import Checkpoint
from octavo.config.config_hooks import skips_blocks
from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.ports import ConnectorWorker
from octavo.engine.protocol.step import StepPlan
from octavo.executor.base import (
    Backend,
    BackendOptions,
    DeviceMemory,
    Runnable,
)
from octavo.executor.kv import BLOCK_SIZE, KvCache, KvLayout
from octavo.program.ops import num_position_axes
from octavo.program.program import Program
from octavo.text.ports import Grammars
from octavo.utils.progress import Report
from octavo.worker.block_map import (
    RangeShape,
    VirtualBlockMap,
    check_addressable,
    describe_ranges,
)
from octavo.worker.cache_engine import CacheEngine, HostShape
from octavo.worker.draft_model import DraftModel
from octavo.worker.input_batch import InputBatch
from octavo.worker.kv_hooks import kv_counters, kv_planner
from octavo.worker.kv_layers import layer_streaming
from octavo.worker.lora.adapter_store import AdapterStore
from octavo.worker.machine import Machine
from octavo.worker.media.encoder_runner import EncoderRunner
from octavo.worker.media.step_media import StepMedia
from octavo.worker.media.tower import Towers
from octavo.worker.memory import SAFE_SHARE, KvBudget, get_kv_demand, group_sizes, plan_kv
from octavo.worker.model_input import ProgramRunner
from octavo.worker.model_runner import ModelRunner
from octavo.worker.pooling_runner import PoolingRunner
from octavo.worker.program_runners import ProgramRunners
from octavo.worker.ranks.messages import RankSlots, SampledTokens, TellReport
from octavo.worker.sampling.draft_sampling import DraftVocabulary
from octavo.worker.sampling.logits_processors import LogitsProcessors, load_processors
from octavo.worker.stages.stage_link import StageLink
from octavo.worker.stages.stage_runner import StageRunner
from octavo.worker.worker import Worker


class LoadedDraft(NamedTuple):
    """The prepared Program of a draft model or head."""

    runnable: Runnable
    ids: DraftVocabulary
    features: int | None = None
    """Cache group of the features that a draft head reads; None for a draft model."""
    checkpoint: Checkpoint | None = None
    """Where its weights are; None: in the model's checkpoint."""
    reads_keys: bool = False
    """Whether it reads the model's KV and has none."""


MakeConnector: TypeAlias = "Callable[[LoadedModel, RankSlots, TellReport], ConnectorWorker]"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model or one rank's part of it, with its Programs prepared. `config` includes all derived
    options.
    """

    config: EngineConfig
    programs: Mapping[str, Program]
    """The model's Programs by name; the first one computes its requests."""
    backend: Backend
    rows: InputBatch
    """Rows of the running requests."""
    runnables: Mapping[str, Runnable]
    """Prepared Programs by the same names, which share one KV cache."""
    adapters: AdapterStore | None = None
    """Adapters for its rows; None without LoRA."""
    towers: Towers | None = None
    """Encoders of images and audio; None if the model accepts text only."""
    draft: LoadedDraft | None = None
    """Draft model with the same block tables; None without one."""
    side: Runnable | None = None
    """Program of an extension, prepared with the weights of the first Program; None without one."""
    link: StageLink | None = None
    """Pipes to the neighbouring pipeline stages; None without pipeline parallelism."""
    make_connector: MakeConnector | None = None
    """Builds the connector of a rank other than the first; None on the first rank."""

    @property
    def program(self) -> Program:
        """The Program that computes its requests."""
        return next(iter(self.programs.values()))

    @property
    def encoder(self) -> str | None:
        """Name of the Program that encodes inputs for the first Program; None without one."""
        encoders = [name for name, one in self.programs.items() if "encoded" in one.outputs]
        return encoders[0] if encoders else None

    @property
    def can_resample(self) -> bool:
        """Whether samples of a step can be verified and resampled."""
        return next(iter(self.runnables.values())).max_verified > 0

    @property
    def layouts(self) -> tuple[KvLayout, ...]:
        """Layouts of the model's cache groups, which all its Programs share."""
        drafting = {} if self.draft is None else {"draft": self.draft.runnable}
        return get_common_layouts({**self.runnables, **drafting})

    def kv_budget(self) -> KvBudget:
        """Returns the size of the KV cache: as set by options, else a safe fraction of the host's
        memory, or the rest of a device's memory.
        """
        config = self.config
        memory = device_memory(self.backend)
        return plan_kv(
            group_sizes(config, self.layouts),
            get_kv_demand(config),
            planner=kv_planner(config),
            wanted_bytes=config.cache.kv_cache_memory_bytes,
            available_bytes=get_host_bytes(config) if memory is None else memory.kv_bytes,
            share=SAFE_SHARE if memory is None else 1.0,
        )

    def num_blocks(self) -> Sequence[int]:
        return self.kv_budget().num_blocks

    def connect(self, slots: RankSlots, tell: TellReport) -> ConnectorWorker:
        """Builds this rank's connector to other engines."""
        assert self.make_connector is not None, "the first rank makes its own"
        return self.make_connector(self, slots, tell)

    def worker(
        self,
        num_blocks: Sequence[int],
        num_host_blocks: Sequence[int],
        connector: ConnectorWorker | None = None,
        report: Report = lambda text: None,
    ) -> Worker:
        """Builds the worker with these numbers of blocks in each group, on the device and for
        swapped requests.
        """
        kv, block_map = self._kv_memory(num_blocks, report)
        host = [
            HostShape(count, layout.block_bytes)
            for count, layout in zip(num_host_blocks, self.layouts, strict=True)
        ]
        media = self._media()
        encoder = self.encoder
        shares_steps = self.config.fleet.num_expert_engines > 1
        is_alone = self.config.backend.num_ranks == 1 and not shares_steps
        return Worker(
            ProgramRunners(
                {name: self._runner(name, kv, media) for name in self.programs if name != encoder},
                None if encoder is None else EncoderRunner(self.runnables[encoder], kv, self.rows),
            ),
            CacheEngine(
                kv,
                host,
                connector,
                block_map,
                counters=kv_counters(kv, self.layouts),
            ),
            self.rows,
            close=self.backend.close,
            is_alone=is_alone,
            shares_steps=shares_steps,
            adapters=self.adapters,
            draft=self._draft_model(kv),
            media=media,
            streaming=layer_streaming(
                connector, next(iter(self.runnables.values())), kv, block_map, self.layouts
            ),
        )

    @property
    def writes_layers(self) -> bool:
        """Whether a step reports each layer as soon as its K and V are written."""
        return next(iter(self.runnables.values())).kv_writes is not None

    def _media(self) -> StepMedia | None:
        if self.towers is None:
            return None
        return StepMedia(self.towers, self.rows, num_axes=num_position_axes(self.program))

    def await_input(self, plan: StepPlan) -> None:
        """Waits for the hidden states of the previous stage, if there is one."""
        if plan.rows and self.link is not None and self.link.before is not None:
            self.link.before.receive()

    def append_tokens(self, sampled: Sequence[SampledTokens]) -> None:
        """Appends tokens that the last stage has sampled."""
        for tokens in sampled:
            self.rows.write_tokens(tokens.request_id, tokens.start, tokens.token_ids)

    def _draft_model(self, kv: KvCache) -> DraftModel | None:
        if self.draft is None:
            return None
        return DraftModel(
            self.draft.runnable,
            kv,
            self.rows,
            ids=self.draft.ids,
            max_tokens=self.config.scheduler.max_num_batched_tokens,
            features=self.draft.features,
            reads_keys=self.draft.reads_keys,
            tree_width=self.config.scheduler.spec_tree_width,
        )

    def _runner(self, name: str, kv: KvCache, media: StepMedia | None) -> ProgramRunner:
        program, runnable = self.programs[name], self.runnables[name]
        if "hidden" in program.outputs:
            assert self.link is not None, "only one of several stages hands on hidden states"
            return StageRunner(runnable, kv, self.rows, self.link)
        if "pooled" not in program.outputs:
            before = None if self.link is None else self.link.before
            in_one_part = self.config.fleet.num_expert_engines > 1
            return ModelRunner(runnable, kv, self.rows, media, before, in_one_part=in_one_part)
        return PoolingRunner(
            runnable,
            kv,
            self.rows,
            num_position_axes=num_position_axes(program),
            keeps_tokens=program.outputs["pooled"].axis == "samples",
        )

    def _kv_memory(
        self, num_blocks: Sequence[int], report: Report
    ) -> tuple[KvCache, VirtualBlockMap | None]:
        """Allocates the KV memory in the configured layout. Also returns the block map;
        None in the paged layout.
        """
        config, backend, layouts = self.config, self.backend, self.layouts
        if config.cache.kv_layout == "paged":
            return backend.allocate(layouts, num_blocks), None
        assert backend.allocates_on_demand, "checked before the weights were read"
        assert config.model.max_model_len is not None, "derive() has set it"
        num_rows, context_blocks = (
            config.scheduler.max_num_seqs,
            -(-config.model.max_model_len // BLOCK_SIZE),
        )
        ranges = [
            RangeShape.build(
                count,
                1 if layout.group.kind == "state" else context_blocks,
                layout.pieces,
                layout.group.num_layers,
            )
            for layout, count in zip(layouts, num_blocks, strict=True)
        ]
        check_addressable(ranges, num_rows=num_rows)
        report(describe_ranges(ranges, num_rows=num_rows))
        kv = backend.allocate_on_demand(layouts, [num_rows * shape.num_blocks for shape in ranges])
        return kv, VirtualBlockMap(kv, ranges, num_rows=num_rows)


def get_common_layouts(runnables: Mapping[str, Runnable]) -> tuple[KvLayout, ...]:
    """Returns the layouts that prepared Programs share; raises ConfigError if they differ."""
    name = ""
    layouts: tuple[KvLayout, ...] = ()
    for other, runnable in runnables.items():
        if layouts and runnable.kv_layouts and runnable.kv_layouts != layouts:
            raise ConfigError(
                f"dtype: the Programs {name} and {other} use different KV cache dtypes, got"
                f" {', '.join(layout.dtype for layout in layouts)} and"
                f" {', '.join(layout.dtype for layout in runnable.kv_layouts)}",
                hint="set kv_cache_dtype",
            )
        if runnable.kv_layouts:
            name, layouts = other, runnable.kv_layouts
    return layouts


def make_input_batch(
    config: EngineConfig, options: BackendOptions, program: Program, grammars: Grammars
) -> InputBatch:
    """Creates the rows for the maximum number of running requests. Raises ConfigError, before any
    weight is read, if they do not fit in memory.
    """
    max_model_len = config.model.max_model_len
    assert max_model_len is not None, "derive() has set it"
    try:
        return InputBatch(
            max_rows=options.max_rows,
            max_model_len=max_model_len,
            num_groups=len(program.groups),
            vocab_size=program.vocab_size,
            grammars=grammars,
            processors=LogitsProcessors(
                load_processors(config.sampler.processors),
                config.sampler.logits_processor_timeout,
            ),
            drafts_forced=config.scheduler.uses_speculation,
            states=[at for at, group in enumerate(program.groups) if group.kind == "state"],
            closes=config.sampler.structured_close,
            input_groups=program.input_groups,
            max_encoder_len=config.model.max_encoder_len or 0,
            goes_without_blocks=skips_blocks(config),
            num_axes=num_position_axes(program),
        )
    except MemoryError:
        what = (
            f"max_num_seqs: got {options.max_requests:,}, but the token ids of that many requests"
            f" of {max_model_len:,} tokens"
        )
        raise ConfigError(
            f"{what} require more memory than available", hint="lower max_num_seqs or max_model_len"
        ) from None


def device_memory(backend: Backend) -> DeviceMemory | None:
    """Returns the memory of a device that has its own. Returns None if the backend uses host
    memory.
    """
    return backend.memory()


def get_host_bytes(config: EngineConfig) -> int | None:
    """Returns the free bytes of host memory, divided by the number of ranks. Returns None if the
    system does not report them.
    """
    available = Machine().available_bytes()
    return None if available is None else available // config.backend.num_ranks
