"""A model whose weights are in place, or one rank's part of it: how many KV blocks fit beside them,
and the worker over these blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.backends.base import (
    Backend,
    BackendOptions,
    DeviceBackend,
    DeviceMemory,
    OnDemandBackend,
    Runnable,
)
from octavo.backends.kv import BLOCK_SIZE, KvCache, KvLayout
from octavo.config.engine_config import EngineConfig
from octavo.errors import ConfigError
from octavo.ports import ConnectorWorker, Grammars
from octavo.program.ops import Embedding
from octavo.program.program import Program
from octavo.progress import Report
from octavo.worker.block_places import (
    BlockPlaces,
    PagedPlaces,
    RangeShape,
    VirtualPlaces,
    check_addressable,
    describe_ranges,
)
from octavo.worker.cache_engine import CacheEngine, HostShape
from octavo.worker.machine import Machine
from octavo.worker.memory import SAFE_SHARE, KvBudget, demand_of, group_sizes, plan_kv
from octavo.worker.model_runner import ModelRunner
from octavo.worker.pooling_runner import PoolingRunner
from octavo.worker.program_runners import ProgramRunners
from octavo.worker.request_rows import RequestRows
from octavo.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model or one rank's part of it, its Programs prepared. `config` has every option derived.
    Implements `ranks.process.LoadedRank`.
    """

    config: EngineConfig
    programs: Mapping[str, Program]
    """The model's Programs by name, the one that its requests run first."""
    backend: Backend
    rows: RequestRows
    """Arrays of the running requests, which the worker keeps."""
    runnables: Mapping[str, Runnable]
    """The prepared Programs by the same names. Each runs over batches of its own, all over one KV
    cache."""

    @property
    def program(self) -> Program:
        """The Program that its requests run."""
        return next(iter(self.programs.values()))

    @property
    def layouts(self) -> tuple[KvLayout, ...]:
        """Layouts of the model's cache groups, which all Programs with KV have in common."""
        return common_layouts(self.runnables)

    def kv_budget(self) -> KvBudget:
        """Returns the KV cache's size: as the options say, else a safe share of the machine's
        memory, or all that is left of a device's own.
        """
        config = self.config
        memory = device_memory(self.backend)
        return plan_kv(
            group_sizes(config, self.layouts),
            demand_of(config),
            wanted_bytes=config.cache.kv_cache_memory_bytes,
            available_bytes=host_bytes(config) if memory is None else memory.kv_bytes,
            share=SAFE_SHARE if memory is None else 1.0,
        )

    def num_blocks(self) -> Sequence[int]:
        """Returns how many KV blocks of each cache group fit."""
        return self.kv_budget().num_blocks

    def worker(
        self,
        num_blocks: Sequence[int],
        num_host_blocks: Sequence[int],
        connector: ConnectorWorker | None = None,
        report: Report = lambda text: None,
    ) -> Worker:
        """Makes the worker, with memory for this many blocks of each group, on the device and for
        swapped requests.
        """
        kv, places = self._kv_memory(num_blocks, report)
        host = [
            HostShape(count, layout.block_bytes)
            for count, layout in zip(num_host_blocks, self.layouts, strict=True)
        ]
        is_alone = self.config.backend.tensor_parallel_size == 1
        return Worker(
            ProgramRunners({name: self._runner(name, kv) for name in self.programs}),
            CacheEngine(kv, host, connector, places),
            self.rows,
            close=self.backend.close,
            is_alone=is_alone,
        )

    def _runner(self, name: str, kv: KvCache) -> ModelRunner | PoolingRunner:
        """Makes what runs a Program's steps, by what the Program makes of its rows."""
        program, runnable = self.programs[name], self.runnables[name]
        if "pooled" not in program.outputs:
            return ModelRunner(runnable, kv, self.rows)
        num_axes = 1 + max((op.axis for op in program.ops if isinstance(op, Embedding)), default=0)
        return PoolingRunner(runnable, kv, self.rows, num_position_axes=num_axes)

    def _kv_memory(self, num_blocks: Sequence[int], report: Report) -> tuple[KvCache, BlockPlaces]:
        """Allocates the device's memory for KV in the layout that the options name, and says where
        blocks lie in it.
        """
        config, backend, layouts = self.config, self.backend, self.layouts
        if config.cache.kv_layout == "paged":
            return backend.allocate(layouts, num_blocks), PagedPlaces()
        assert isinstance(backend, OnDemandBackend), "it was refused before the weights were read"
        assert config.model.max_model_len is not None, "derive() has set it"
        num_rows, context_blocks = (
            config.scheduler.max_num_seqs,
            -(-config.model.max_model_len // BLOCK_SIZE),
        )
        ranges = [
            RangeShape.of(count, context_blocks, layout.pieces, layout.group.num_layers)
            for layout, count in zip(layouts, num_blocks, strict=True)
        ]
        check_addressable(ranges, num_rows=num_rows)
        report(describe_ranges(ranges, num_rows=num_rows))
        kv = backend.allocate_on_demand(layouts, [num_rows * shape.num_blocks for shape in ranges])
        return kv, VirtualPlaces(kv, ranges, num_rows=num_rows)


def common_layouts(runnables: Mapping[str, Runnable]) -> tuple[KvLayout, ...]:
    """Returns the layouts that prepared Programs share; ConfigError where two of them differ."""
    name = ""
    layouts: tuple[KvLayout, ...] = ()
    for other, runnable in runnables.items():
        if layouts and runnable.kv_layouts and runnable.kv_layouts != layouts:
            raise ConfigError(
                f"dtype: the Programs {name} and {other} keep K and V differently, got"
                f" {', '.join(layout.dtype for layout in layouts)} and"
                f" {', '.join(layout.dtype for layout in runnable.kv_layouts)}",
                hint="name one kv_cache_dtype",
            )
        if runnable.kv_layouts:
            name, layouts = other, runnable.kv_layouts
    return layouts


def request_rows(
    config: EngineConfig, options: BackendOptions, program: Program, grammars: Grammars
) -> RequestRows:
    """Makes the arrays of as many requests as may run; ConfigError, before any weight is read,
    where they do not fit into memory.
    """
    max_model_len = config.model.max_model_len
    assert max_model_len is not None, "derive() has set it"
    try:
        return RequestRows(
            max_rows=options.max_rows,
            max_model_len=max_model_len,
            num_groups=len(program.groups),
            vocab_size=program.vocab_size,
            grammars=grammars,
        )
    except MemoryError:
        what = (
            f"max_num_seqs: got {options.max_requests:,}, but the token ids of so many requests of"
            f" {max_model_len:,} tokens"
        )
        raise ConfigError(
            f"{what} take more memory than there is", hint="lower max_num_seqs or max_model_len"
        ) from None


def device_memory(backend: Backend) -> DeviceMemory | None:
    """Returns the memory of a device that has its own; None where it is the machine's."""
    return backend.memory() if isinstance(backend, DeviceBackend) else None


def host_bytes(config: EngineConfig) -> int | None:
    """Returns the bytes of the machine's memory that are free, or one rank's share of them; None
    where the system does not say.
    """
    available = Machine().available_bytes()
    return None if available is None else available // config.backend.tensor_parallel_size
