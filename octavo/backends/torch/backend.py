"""The torch backend: Programs on any device PyTorch has, computed in fp32, bf16 or fp16.

Owns the choice of device and precision, the weights on the device and the layout of the KV cache.
Imported by the factory in `wiring/model.py` only, once `backends/devices.py` has found PyTorch;
nothing here or below needs the compiled extension.
"""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Sequence

import torch

from octavo.backends.base import (
    BackendOptions,
    Ceilings,
    DeviceMemory,
    Footprint,
    FormatOf,
    LoadWeight,
)
from octavo.backends.kv import BLOCK_SIZE, KvLayout
from octavo.backends.torch.attention.choose import choose_attention, first_that_computes
from octavo.backends.torch.footprint import graphs_footprint, torch_footprint
from octavo.backends.torch.fp8 import E4M3
from octavo.backends.torch.graphs import CudaGraphs, sizes_up_to
from octavo.backends.torch.invariant import kernels_suffice
from octavo.backends.torch.kernels import choose_kernels
from octavo.backends.torch.kv_cache import TorchKvCache, layout_of
from octavo.backends.torch.memory import CudaMemory, blocks_of, largest_step
from octavo.backends.torch.program import FORMULAS, Runtime, TorchProgram
from octavo.backends.torch.ranks import TorchRanks
from octavo.backends.torch.rates import measured_ceilings
from octavo.backends.torch.step import staging_bytes
from octavo.backends.torch.weights import ProgramWeights
from octavo.errors import BackendUnavailable, ConfigError
from octavo.program import ops
from octavo.program.passes.optimize import optimize
from octavo.program.program import Op, Program, Weight
from octavo.quant.packed import PackedWeight

MASKS = ("causal", "window", "full")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES_OF_CODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "fp8": E4M3}

logger = logging.getLogger(__name__)

LEAST_BF16_CAPABILITY = (8, 0)
"""Older GPUs compute bf16 in fp32."""


class TorchBackend:
    """Implements `base.Backend`. `device` as `devices.choose_device` gives it, or one of several;
    `ranks`: the others, if any.
    """

    name = "torch"

    def __init__(
        self, options: BackendOptions, device: str = "cpu", ranks: TorchRanks | None = None
    ) -> None:
        if options.kv_cache_dtype != "auto" and options.kv_cache_dtype not in KV_DTYPES:
            raise BackendUnavailable(
                f"kv_cache_dtype: the torch backend has {', '.join(KV_DTYPES)}, got"
                f" {options.kv_cache_dtype}"
            )
        self.options = options
        self.device = torch.device(device)
        self.ranks = ranks
        self._attention = choose_attention(options, self.device)
        self._kernels = choose_kernels(
            options.torch_kernels, self.device, fixed_tiles=options.batch_invariant
        )
        kernels = " or ".join(choice.name for choice in self._attention)
        self.numerics = (
            f"torch {torch.__version__} on {self.device_name}, attention with {kernels}, kernels"
            f" {self._kernels.name}"
        )
        self._uncaptured: list[tuple[TorchProgram, tuple[int, ...]]] = []
        """Programs whose decode steps of these sizes become graphs once there is a KV cache."""
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

    def prepare(self, program: Program, load: LoadWeight) -> TorchProgram:
        optimized, once = optimize(program), _Once(load)
        dtype = DTYPES.get(self.options.dtype) or self._dtype_of_products(optimized, once.load)
        self._check(optimized)
        weights = self._load(optimized, once.load, dtype)
        options = self.options
        attention = first_that_computes(self._attention, optimized, self._kv_dtype(dtype))
        runtime = Runtime(
            self.device,
            dtype,
            attention,
            self._kernels,
            options.batch_invariant,
            options.batch_invariant
            and not kernels_suffice(optimized, self._kernels, attention, self.device),
            self._num_threads,
            staging_bytes(options, len(optimized.groups)),
            options.max_rows,
            self.ranks,
        )
        prepared = TorchProgram(optimized, weights, runtime, self._kv_layouts(optimized, dtype))
        if self._memory is not None:
            self._memory.measure(prepared.weight_bytes, lambda: self.run_largest_step(prepared))
            if sizes := self.graph_sizes(optimized, dtype):
                states = attention.graph_bytes(optimized, max(sizes), options.max_context)
                self._memory.reserve("graphs", graphs_footprint(optimized, sizes, dtype) + states)
                self._uncaptured.append((prepared, sizes))
            elif self._wants_graphs(optimized) and (why := self.against_graphs(optimized, dtype)):
                logger.warning(
                    "decode steps of the %s are not captured as graphs: %s", program.name, why
                )
        return prepared

    @property
    def computes_apart(self) -> bool:
        return self.device.type == "cuda"

    def graph_sizes(self, program: Program, dtype: torch.dtype) -> tuple[int, ...]:
        """Numbers of requests whose decode steps are captured; () where nothing can be, or is to
        be.
        """
        if not self._wants_graphs(program) or self.against_graphs(program, dtype):
            return ()
        most, expert_rows = self.options.max_requests, self._kernels.captured_rows
        most_experts = max((op.top_k for op in program.ops if isinstance(op, ops.Route)), default=0)
        if most_experts and expert_rows is not None:
            most = min(most, expert_rows // most_experts)
        return sizes_up_to(most)

    def against_graphs(self, program: Program, dtype: torch.dtype) -> str:
        """Which option keeps decode steps from being captured; "" where none does."""
        if self.ranks is not None:
            return "not with several ranks (tensor_parallel_size)"
        if self.options.batch_invariant:
            return "not with batch_invariant"
        attention = first_that_computes(self._attention, program, self._kv_dtype(dtype))
        return (
            ""
            if attention.for_graphs
            else f"not with the attention of {attention.name}, which reads lengths on the host"
        )

    def _wants_graphs(self, program: Program) -> bool:
        return (
            self.device.type == "cuda"
            and not self.options.enforce_eager
            and "logits" in program.outputs
        )

    def run_largest_step(self, prepared: TorchProgram) -> None:
        """Runs a Program's largest step over a KV cache of its own, which is freed at once."""
        layouts = prepared.kv_layouts
        batch = largest_step(self.options, len(layouts), prepared.program.vocab_size)
        prepared.run(batch, self._cache(layouts, [blocks_of(batch)] * len(layouts)))

    def memory(self) -> DeviceMemory | None:
        return None if self._memory is None else self._memory.now()

    def footprint(self, program: Program, format_of: FormatOf) -> Footprint:
        found = torch_footprint(
            optimize(program),
            format_of,
            self.options.max_tokens,
            DTYPES.get(self.options.dtype),
            self._packed_dtype,
        )
        layouts = self._kv_layouts(program, found.dtype)
        return Footprint(found.weight_bytes, found.step_bytes, layouts, found.code)

    def measure(self, num_bytes: int, code: str) -> Ceilings:
        return measured_ceilings(
            num_bytes, DTYPES_OF_CODES.get(code, self._packed_dtype), self.device
        )

    def allocate(self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]) -> TorchKvCache:
        """Makes the KV cache, then captures graphs over it, which hold its addresses."""
        kv = self._cache(layouts, num_blocks)
        width = -(-self.options.max_context // BLOCK_SIZE)
        for prepared, sizes in self._uncaptured:
            if prepared.kv_layouts == tuple(layouts):
                prepared.capture(kv, sizes, width, CudaGraphs())
        return kv

    def _cache(self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]) -> TorchKvCache:
        try:
            return TorchKvCache(layouts, num_blocks, self.device)
        except (MemoryError, RuntimeError) as error:
            needed = sum(
                layout.block_bytes * count
                for layout, count in zip(layouts, num_blocks, strict=True)
            )
            raise ConfigError(
                f"the KV cache needs {needed} bytes, which the device does not give: {error}"
            ) from None

    def close(self) -> None:
        """Memory goes with the tensors."""

    @property
    def _num_threads(self) -> int | None:
        return self.options.num_threads if self.device.type == "cpu" else None

    @property
    def _packed_dtype(self) -> torch.dtype:
        """In which products with packed weights are computed, where the options do not say."""
        if self.device.type != "cuda":
            return torch.float32
        return (
            torch.bfloat16
            if torch.cuda.get_device_capability(self.device) >= LEAST_BF16_CAPABILITY
            else torch.float16
        )

    def _kv_layouts(self, program: Program, dtype: torch.dtype) -> tuple[KvLayout, ...]:
        return tuple(layout_of(group, self._kv_dtype(dtype)) for group in program.groups)

    def _kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """`dtype`: that of Values, in which K and V are kept where the options do not say."""
        return KV_DTYPES.get(self.options.kv_cache_dtype, dtype)

    def _dtype_of_products(self, program: Program, load: LoadWeight) -> torch.dtype:
        """auto: what the first product's weight has in the file; it stands for all."""
        first = next((op.weights_[0] for op in program.ops if isinstance(op, ops.Linear)), None)
        return (
            self._packed_dtype
            if first is None
            else DTYPES_OF_CODES.get(load(first).packed().code, self._packed_dtype)
        )

    def _load(self, program: Program, load: LoadWeight, dtype: torch.dtype) -> ProgramWeights:
        reads = Counter(weight for op in program.ops for weight in op.weights)
        weights = ProgramWeights(
            load, self.device, dtype, {weight for weight, count in reads.items() if count > 1}
        )
        for op in program.ops:
            _add_weights(op, weights)
        return weights

    def _check(self, program: Program) -> None:
        for op in program.ops:
            self._check_op(program, op)
        for group in program.groups:
            if group.kind == "state":
                raise _refused(program, f"cache groups of kind {group.kind}")

    def _check_op(self, program: Program, op: Op) -> None:
        if type(op) not in FORMULAS:
            raise _refused(program, f"the op {op.kind}")
        num_ranks = 1 if self.ranks is None else self.ranks.num_ranks
        if isinstance(op, ops.AllGather) and len(op.widths) != num_ranks:
            raise _refused(
                program, f"the op AllGather over {len(op.widths)} ranks on one of {num_ranks}"
            )
        if isinstance(op, ops.AllReduce) and num_ranks == 1:
            raise _refused(program, "the op AllReduce on one rank")
        if isinstance(op, ops.Attention) and op.mask not in MASKS:
            raise _refused(program, f"attention with the mask {op.mask}")
        if (
            isinstance(op, ops.Attention)
            and op.mask == "full"
            and self.options.batch_invariant
            and _writes(program, op.group)
        ):
            raise _refused(program, "attention to later tokens with batch_invariant")


class _Once:
    """Keeps the first weight that is asked for, which says how products are computed before it is
    packed.
    """

    def __init__(self, load: LoadWeight) -> None:
        self._load = load
        self._first: tuple[Weight, PackedWeight] | None = None

    def load(self, weight: Weight) -> PackedWeight:
        if self._first is None:
            self._first = (weight, self._load(weight).packed())
        return self._first[1] if self._first[0] == weight else self._load(weight).packed()


def _writes(program: Program, group: str) -> bool:
    return any(isinstance(op, ops.KvWrite) and op.group == group for op in program.ops)


def _refused(program: Program, what: str) -> BackendUnavailable:
    return BackendUnavailable(f"the torch backend cannot run {what} (in {program.name})")


def _add_weights(op: Op, weights: ProgramWeights) -> None:
    """Matrices as they are packed; everything else, vectors all, in fp32."""
    matrices: tuple[Weight | None, ...] = ()
    if isinstance(op, ops.Linear):
        weights.add_product(op)
        matrices = (*op.weights_, *op.biases)
    elif isinstance(op, ops.Embedding):
        matrices = (op.table,)
        weights.add_matrix(op.table)
    elif isinstance(op, ops.GroupedLinear):
        matrices = (op.weight,)
        weights.add_matrix(op.weight)
    elif isinstance(op, ops.MlaAttention):
        matrices = (op.kv_b,)
        weights.add_matrix(op.kv_b)
    elif isinstance(op, ops.Rope):
        weights.add_constant(op.table, op.table.inv_freq)
    elif isinstance(op, ops.Attention) and isinstance(op.bias, ops.AlibiBias):
        weights.add_constant(op.bias, op.bias.slopes)
    for weight in op.weights:
        if weight not in matrices:
            weights.add_vector(weight)
