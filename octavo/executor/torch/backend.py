"""The torch backend: runs Programs on any PyTorch device in fp32, bf16 or fp16.

Owns device and precision choice, device weights and KV layout. Imported only by the factory in
`wiring/model.py` once `executor/devices.py` has found PyTorch; does not need the compiled
extension.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
from collections.abc import Sequence

import numpy as np
import torch

from octavo.api.errors import BackendUnavailable, ConfigError
from octavo.executor.base import (
    Backend,
    BackendOptions,
    Ceilings,
    DeviceMemory,
    Footprint,
    FormatOf,
    LoadWeight,
)
from octavo.executor.kv import BLOCK_SIZE, KvLayout
from octavo.executor.rank_grid import ALONE, RankGrid, misplaced
from octavo.executor.torch.attention.call import AttentionKernels
from octavo.executor.torch.attention.choose import choose_attention, first_that_computes
from octavo.executor.torch.compilations import COMPILATIONS
from octavo.executor.torch.footprint import TorchFootprint, graphs_footprint, torch_footprint
from octavo.executor.torch.graphs import CudaGraphs, GraphShape, shapes_up_to
from octavo.executor.torch.instructions import FORMULAS
from octavo.executor.torch.invariant import kernels_suffice
from octavo.executor.torch.kernels import choose_kernels
from octavo.executor.torch.kv_cache import TorchKvCache, make_kv_layout
from octavo.executor.torch.memory import CudaMemory, count_written_blocks, largest_step
from octavo.executor.torch.program import Runtime, TorchProgram
from octavo.executor.torch.ranks import TorchRanks
from octavo.executor.torch.rates import measured_ceilings
from octavo.executor.torch.step import staging_bytes
from octavo.executor.torch.warm_up import warm_up_steps
from octavo.executor.torch.weights.fp8 import E4M3
from octavo.executor.torch.weights.program_weights import load_weights
from octavo.program import expert_ops, ops
from octavo.program.passes.optimize import optimize
from octavo.program.program import Op, Program, Weight
from octavo.quant.packed import PackedWeight

MASKS = ("causal", "window", "chunk", "full")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES_OF_CODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "fp8": E4M3}

logger = logging.getLogger(__name__)

LEAST_BF16_CAPABILITY = (8, 0)
"""First compute capability with bf16 matmuls; older GPUs emulate bf16 in fp32."""


class TorchBackend(Backend):
    name = "torch"

    def __init__(
        self,
        options: BackendOptions,
        device: str = "cpu",
        ranks: TorchRanks | None = None,
        attention: tuple[AttentionKernels, ...] | None = None,
    ) -> None:
        """`device` comes from `devices.choose_device`; `ranks` is set if several processes share a
        Program; `attention` overrides the kernels that the options name.
        """
        if options.kv_cache_dtype != "auto" and options.kv_cache_dtype not in KV_DTYPES:
            raise BackendUnavailable(
                f"kv_cache_dtype: got {options.kv_cache_dtype}, the torch backend supports"
                f" {', '.join(KV_DTYPES)}",
                hint="use int8",
            )
        self.options = options
        self.device = torch.device(device)
        self.ranks = ranks
        self._attention = attention or choose_attention(options, self.device)
        self._kernels = choose_kernels(
            options.torch_kernels, self.device, fixed_tiles=options.batch_invariant
        )
        kernels = " or ".join(choice.name for choice in self._attention)
        self.numerics = (
            f"torch {torch.__version__} on {self.device_name}, attention with {kernels}, kernels"
            f" {self._kernels.name}"
        )
        self._unallocated: list[tuple[TorchProgram, tuple[GraphShape, ...]]] = []
        """Programs to warm up, and shapes to capture as graphs, once there is a KV cache."""
        self._memory = (
            CudaMemory(self.device, options.gpu_memory_utilization)
            if self.device.type == "cuda"
            else None
        )

    @property
    def device_name(self) -> str:
        return (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else f"CPU ({platform.machine()})"
        )

    def check(self, program: Program, format_of: FormatOf) -> None:
        """Rejects unsupported ops, cache groups, weight formats and KV dtypes."""
        optimized = optimize(program)
        self._check(optimized)
        dtype = self._footprint(optimized, format_of).dtype
        first_that_computes(self._attention, optimized, self._kv_dtype(dtype))

    def prepare_program(self, program: Program, load: LoadWeight) -> TorchProgram:
        optimized, once = optimize(program), _FirstWeightKept(load)
        self._check(optimized)
        self._warn_of_ranks()
        dtype = DTYPES.get(self.options.dtype) or self._get_compute_dtype(optimized, once.load)
        attention = first_that_computes(self._attention, optimized, self._kv_dtype(dtype))
        weights = load_weights(optimized, once.load, self.device, dtype)
        runtime = self._runtime(optimized, dtype, attention)
        prepared = TorchProgram(optimized, weights, runtime, self._kv_layouts(optimized, dtype))
        prepared.adapters.reserve(
            self.options.num_adapters,
            self.options.max_adapter_rank,
            now=self.device.type == "cuda",
        )
        if self._memory is not None:
            with COMPILATIONS.expected():
                self._memory.measure(prepared.weight_bytes, lambda: self.run_largest_step(prepared))
            self._plan_graphs(prepared, runtime, self._memory)
        return prepared

    def _warn_of_ranks(self) -> None:
        """Logs, on the first rank, what the number of ranks may change."""
        ranks, invariant = self.ranks, self.options.batch_invariant
        if ranks is not None and ranks.rank == 0 and ranks.grid.num_tensor > 1 and not invariant:
            logger.warning(
                "logprobs may differ from those of one process: in fp32 in the last bits, in bf16"
                " by up to 0.1; batch_invariant prevents it"
            )

    def _check(self, optimized: Program) -> None:
        check_program(
            optimized,
            grid=ALONE if self.ranks is None else self.ranks.grid,
            batch_invariant=self.options.batch_invariant,
        )

    def _runtime(
        self, optimized: Program, dtype: torch.dtype, attention: AttentionKernels
    ) -> Runtime:
        options = self.options
        whole_steps = kernels_suffice(optimized, self._kernels, attention, self.device)
        return Runtime(
            device=self.device,
            dtype=dtype,
            attention=attention,
            kernels=self._kernels,
            batch_invariant=options.batch_invariant,
            rows_alone=options.batch_invariant and not whole_steps,
            num_threads=self.options.num_threads if self.device.type == "cpu" else None,
            staging_bytes=staging_bytes(options, len(optimized.groups)),
            max_rows=options.max_rows,
            ranks=self.ranks,
        )

    def _plan_graphs(self, prepared: TorchProgram, runtime: Runtime, memory: CudaMemory) -> None:
        """Reserves memory for captured steps, or logs why none will be captured."""
        program, dtype = prepared.program, runtime.dtype
        shapes = self.graph_shapes(program, dtype)
        self._unallocated.append((prepared, shapes))
        if shapes:
            most = max(shape.requests for shape in shapes)
            states = runtime.attention.graph_bytes(program, most, self.options.max_context)
            sizes = [shape.num_rows for shape in shapes]
            memory.reserve("graphs", graphs_footprint(program, sizes, dtype) + states)
        elif self._wants_graphs(program) and (why := self.against_graphs(program, dtype)):
            logger.warning(
                "CUDA graphs are disabled for decode steps of the %s: %s", program.name, why
            )

    @property
    def has_own_device(self) -> bool:
        return self.device.type == "cuda"

    def graph_shapes(self, program: Program, dtype: torch.dtype) -> tuple[GraphShape, ...]:
        """Returns the shapes of captured steps; () if none are."""
        if not self._wants_graphs(program) or self.against_graphs(program, dtype):
            return ()
        max_requests, expert_rows = self.options.max_requests, self._kernels.captured_rows
        most_experts = max(
            (op.top_k for op in program.ops if isinstance(op, expert_ops.Route)), default=0
        )
        if most_experts and expert_rows is not None:
            return shapes_up_to(min(max_requests, expert_rows // most_experts))
        # Padded rows within a request would change a recurrence's state.
        has_states = any(group.kind == "state" for group in program.groups)
        shapes = shapes_up_to(max_requests, 0 if has_states else self.options.max_drafted)
        if self.options.num_adapters and expert_rows is None:
            shapes += tuple(shape._replace(adapters=True) for shape in shapes)
        return shapes

    def against_graphs(self, program: Program, dtype: torch.dtype) -> str:
        """Returns the reason why decode steps cannot be captured; "" if they can."""
        if self.ranks is not None:
            return "not with several ranks (tensor_parallel_size)"
        if self.options.batch_invariant:
            return "not with batch_invariant"
        attention = first_that_computes(self._attention, program, self._kv_dtype(dtype))
        return (
            ""
            if attention.for_graphs
            else f"not with the attention of {attention.name}, which requires lengths on the host"
        )

    def _wants_graphs(self, program: Program) -> bool:
        return (
            self.device.type == "cuda"
            and not self.options.enforce_eager
            and "logits" in program.outputs
        )

    def run_largest_step(self, prepared: TorchProgram) -> None:
        """Runs a Program's largest step on a temporary KV cache."""
        layouts = prepared.kv_layouts
        batch = largest_step(self.options, len(layouts), prepared.program.vocab_size)
        prepared.run(batch, self._cache(layouts, [count_written_blocks(batch)] * len(layouts)))

    def memory(self) -> DeviceMemory | None:
        return None if self._memory is None else self._memory.now()

    def footprint(self, program: Program, format_of: FormatOf) -> Footprint:
        torch_bytes = self._footprint(optimize(program), format_of)
        layouts = self._kv_layouts(program, torch_bytes.dtype)
        return Footprint(
            torch_bytes.weight_bytes, torch_bytes.step_bytes, layouts, torch_bytes.code
        )

    def _footprint(self, optimized: Program, format_of: FormatOf) -> TorchFootprint:
        return torch_footprint(
            optimized,
            format_of,
            self.options.max_tokens,
            DTYPES.get(self.options.dtype),
            self.packed_dtype,
        )

    def measure(self, num_bytes: int, footprint: Footprint) -> Ceilings:
        return measured_ceilings(
            num_bytes, DTYPES_OF_CODES.get(footprint.code, self.packed_dtype), self.device
        )

    def allocate(self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]) -> TorchKvCache:
        """Allocates the KV cache, then warms up kernels and captures graphs, which contain its
        addresses.
        """
        kv = self._cache(layouts, num_blocks)
        width = -(-self.options.max_context // BLOCK_SIZE)
        for prepared, shapes in self._unallocated:
            if prepared.kv_layouts == tuple(layouts):
                with COMPILATIONS.expected():
                    if self.ranks is None:
                        self.warm_up(prepared, kv)
                    if shapes:
                        prepared.capture(kv, shapes, width, CudaGraphs())
        return kv

    def warm_up(self, prepared: TorchProgram, kv: TorchKvCache) -> None:
        """Compiles the kernels of all steps of a Program that reads token ids."""
        program = prepared.program
        if "token_ids" not in program.inputs or any(g.kind == "cross" for g in program.groups):
            return
        vocab_size = program.vocab_size if "logits" in program.outputs else None
        steps = warm_up_steps(
            self.options, len(kv.groups), ops.num_position_axes(program), vocab_size
        )
        for step in steps:
            prepared.run(step, kv)
            if self.options.num_adapters:
                adapters = np.zeros(len(step.token_ids), np.int32)
                prepared.run(dataclasses.replace(step, adapter_rows=adapters), kv)

    def _cache(self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]) -> TorchKvCache:
        try:
            return TorchKvCache(layouts, num_blocks, self.device)
        except (MemoryError, RuntimeError) as error:
            needed = sum(
                layout.block_bytes * count
                for layout, count in zip(layouts, num_blocks, strict=True)
            )
            raise ConfigError(
                f"the KV cache needs {needed} bytes, which the device cannot allocate: {error}",
                hint="lower max_model_len, max_num_seqs or gpu_memory_utilization",
            ) from None

    def close(self) -> None:
        """Does nothing: memory is freed with the tensors."""

    @property
    def packed_dtype(self) -> torch.dtype:
        """Default compute dtype of matmuls with packed weights."""
        if self.device.type != "cuda":
            return torch.float32
        return (
            torch.bfloat16
            if torch.cuda.get_device_capability(self.device) >= LEAST_BF16_CAPABILITY
            else torch.float16
        )

    def _kv_layouts(self, program: Program, dtype: torch.dtype) -> tuple[KvLayout, ...]:
        return tuple(make_kv_layout(group, self._kv_dtype(dtype)) for group in program.groups)

    def _kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of K and V: from the options, or `dtype`."""
        return KV_DTYPES.get(self.options.kv_cache_dtype, dtype)

    def _get_compute_dtype(self, program: Program, load: LoadWeight) -> torch.dtype:
        """Returns the compute dtype for "auto": the dtype of the first matmul's weight in the
        file.
        """
        first = next((op.weights_[0] for op in program.ops if isinstance(op, ops.Linear)), None)
        return (
            self.packed_dtype
            if first is None
            else DTYPES_OF_CODES.get(load(first).packed().code, self.packed_dtype)
        )


class _FirstWeightKept:
    """Caches the first weight: it determines the compute dtype and is packed later."""

    def __init__(self, load: LoadWeight) -> None:
        self._load = load
        self._first: tuple[Weight, PackedWeight] | None = None

    def load(self, weight: Weight) -> PackedWeight:
        if self._first is None:
            self._first = (weight, self._load(weight).packed())
        return self._first[1] if self._first[0] == weight else self._load(weight).packed()


def check_program(program: Program, *, grid: RankGrid, batch_invariant: bool) -> None:
    """Raises BackendUnavailable naming the unsupported op or cache group."""
    for op in program.ops:
        if reason := _unsupported_reason(op, grid) or _variance_reason(
            op, program, batch_invariant
        ):
            raise _unavailable(program, reason)


def _unsupported_reason(op: Op, grid: RankGrid) -> str | None:
    if type(op) not in FORMULAS:
        return f"the op {op.kind}"
    if reason := misplaced(op, grid):
        return reason
    if isinstance(op, ops.Attention) and op.mask not in MASKS:
        return f"attention with the mask {op.mask}"
    return None


def _variance_reason(op: Op, program: Program, batch_invariant: bool) -> str | None:
    """Rejects attention to later tokens with batch_invariant, which may compute each row in a
    separate step.
    """
    ahead = isinstance(op, ops.Attention) and (op.mask == "full" or op.sees_ahead)
    if not batch_invariant or not isinstance(op, ops.Attention) or not ahead:
        return None
    written = {write.group for write in program.ops if isinstance(write, ops.KvWrite)}
    return "attention to later tokens with batch_invariant" if op.group in written else None


def _unavailable(program: Program, what: str) -> BackendUnavailable:
    return BackendUnavailable(f"the torch backend cannot run {what} (in {program.name})")
