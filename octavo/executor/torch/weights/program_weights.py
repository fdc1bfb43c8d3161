"""Weights of a prepared Program on a PyTorch device, and the matmuls that read them.

Each weight is loaded once and stored in the form that its readers need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.api.errors import WeightMismatch
from octavo.executor.base import LoadWeight
from octavo.executor.torch.weights.device_weight import DeviceWeight, LinearFn, to_device
from octavo.program import expert_ops, family_ops, ops
from octavo.program.ops import Linear
from octavo.program.position_tables import position_table
from octavo.program.program import Op, Program, Weight
from octavo.quant.packed import PackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """Weights of one Linear, joined into one matmul if compatible."""

    parts: tuple[DeviceWeight, ...]
    bias: Tensor | None
    """Biases of all outputs, `[sum of out]`."""

    @property
    def is_scaled(self) -> bool:
        """Whether there is one weight, whose stored e4m3 codes are multiplied."""
        return len(self.parts) == 1 and self.parts[0].is_scaled

    def __call__(self, x: Tensor, linear: LinearFn = F.linear) -> Tensor:
        """Multiplies `x [T, in]`, floats by `linear`; returns `[T, sum of out]`."""
        if len(self.parts) == 1:
            return self.parts[0].product(x, self.bias, linear)
        joined = torch.cat([part.product(x, None, linear) for part in self.parts], dim=1)
        return joined if self.bias is None else joined + self.bias


class ProgramWeights:
    """Weights of a Program, loaded once: matrices as packed, vectors in fp32.

    Looked up by object id during a step: hashing a Weight takes longer than a small matmul.
    """

    def __init__(
        self, load: LoadWeight, device: torch.device, dtype: torch.dtype, shared: Collection[Weight]
    ) -> None:
        """`shared` are weights that several ops read. Other weights are freed once a joined matmul
        has a copy of them.
        """
        self._load = load
        self._device = device
        self._dtype = dtype
        self._shared = shared
        self._matrices: dict[Weight, DeviceWeight] = {}
        self._vectors: dict[Weight, Tensor] = {}
        self._kept: dict[int, Any] = {}
        self._products: list[Product] = []
        self._tables: list[Tensor] = []

    def add_matrix(self, weight: Weight) -> None:
        self._kept[id(weight)] = self._matrix(weight)

    def add_vector(self, weight: Weight) -> None:
        """Adds a weight as an fp32 vector, regardless of its format."""
        self._kept[id(weight)] = self._vector(weight)

    def add_product(self, linear: Linear) -> None:
        weights = linear.weights_
        parts = tuple(self._matrix(weight) for weight in weights)
        if len(parts) > 1 and all(part.joins(parts[0]) for part in parts):
            parts = (DeviceWeight.joined(parts),)
            for weight in weights:
                if weight not in self._shared:
                    self._matrices.pop(weight, None)
        product = Product(parts, self._bias(linear) if any(linear.biases) else None)
        self._products.append(product)
        self._kept[id(linear)] = product

    def add_constant(self, owner: object, values: Sequence[float]) -> None:
        """Adds constants of an op, in fp64."""
        self._kept[id(owner)] = torch.tensor(values, dtype=torch.float64, device=self._device)

    def add_position_table(self, op: family_ops.PositionScores) -> None:
        """Adds the position table of an op, `[H, R, D] fp32`."""
        table = position_table(op, lambda weight: self._pack(weight).dequantize())
        self._tables.append(to_device(table.astype(np.float32), self._device))
        self._kept[id(op)] = self._tables[-1]

    def matrix(self, weight: Weight) -> DeviceWeight:
        weight_on_device: DeviceWeight = self._kept[id(weight)]
        return weight_on_device

    def vector(self, weight: Weight) -> Tensor:
        tensor: Tensor = self._kept[id(weight)]
        return tensor

    def product(self, linear: Linear) -> Product:
        joined: Product = self._kept[id(linear)]
        return joined

    def constant(self, owner: object) -> Tensor:
        tensor: Tensor = self._kept[id(owner)]
        return tensor

    @property
    def num_bytes(self) -> int:
        merged = [part for product in self._products for part in product.parts]
        matrix_bytes = {
            id(weight): weight.num_bytes for weight in [*self._matrices.values(), *merged]
        }
        vectors = sum(tensor.nbytes for tensor in [*self._vectors.values(), *self._tables])
        return (
            sum(matrix_bytes.values())
            + vectors
            + sum(product.bias.nbytes for product in self._products if product.bias is not None)
        )

    def _matrix(self, weight: Weight) -> DeviceWeight:
        if weight not in self._matrices:
            self._matrices[weight] = DeviceWeight.of(
                self._pack(weight), self._device, self._dtype, weight.whole.shape[-2]
            )
        return self._matrices[weight]

    def _vector(self, weight: Weight) -> Tensor:
        if weight not in self._vectors:
            self._vectors[weight] = to_device(self._pack(weight).dequantize(), self._device)
        return self._vectors[weight]

    def _bias(self, linear: Linear) -> Tensor:
        """Returns the biases of all slices, zero for slices without one."""
        pairs = zip(linear.weights_, linear.biases, strict=True)
        parts = [
            torch.zeros(w.shape[0]) if b is None else torch.from_numpy(self._pack(b).dequantize())
            for w, b in pairs
        ]
        return torch.cat(parts).to(self._device, self._dtype)

    def _pack(self, weight: Weight) -> PackedWeight:
        packed = self._load(weight).packed()
        if packed.shape != weight.shape:
            raise WeightMismatch(f"{weight.name} has shape {packed.shape}, expected {weight.shape}")
        return packed


def load_weights(
    program: Program, load: LoadWeight, device: torch.device, dtype: torch.dtype
) -> ProgramWeights:
    """Loads all weights of a Program; plain floats of matmuls become `dtype`."""
    reads = Counter(weight for op in program.ops for weight in op.weights)
    shared = {weight for weight, count in reads.items() if count > 1}
    weights = ProgramWeights(load, device, dtype, shared)
    for op in program.ops:
        _add_weights(op, weights)
    return weights


def _add_weights(op: Op, weights: ProgramWeights) -> None:
    """Adds an op's weights: matrices as packed, everything else as fp32 vectors."""
    matrices: tuple[Weight | None, ...] = ()
    if isinstance(op, ops.Linear):
        weights.add_product(op)
        matrices = (*op.weights_, *op.biases)
    elif isinstance(op, ops.Embedding):
        matrices = (op.table,)
        weights.add_matrix(op.table)
    elif isinstance(op, expert_ops.GroupedLinear):
        matrices = (op.weight,)
        weights.add_matrix(op.weight)
    elif isinstance(op, ops.MlaAttention):
        matrices = (op.kv_b,)
        weights.add_matrix(op.kv_b)
    elif isinstance(op, family_ops.PositionScores):
        matrices = op.weights
        weights.add_position_table(op)
    elif isinstance(op, ops.Rope):
        weights.add_constant(op.table, op.table.inv_freq)
        if op.table.long is not None:
            weights.add_constant(op.table.long, op.table.long.inv_freq)
    elif isinstance(op, ops.Attention) and isinstance(op.bias, ops.AlibiBias):
        weights.add_constant(op.bias, op.bias.slopes)
    for weight in op.weights:
        if weight not in matrices:
            weights.add_vector(weight)
