"""Weights on a PyTorch device: packed as `quant.packed` has them, turned to floats where a product
reads them.

Knows the packed weight's arithmetic, in torch and bit for bit that of `PackedWeight.dequantize`;
knows no op.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.base import LoadWeight
from octavo.backends.torch.fp8 import E4M3, is_scaled, scaled_product
from octavo.errors import WeightMismatch
from octavo.program.ops import Linear
from octavo.program.program import Weight
from octavo.quant.packed import Levels, NibbleOrder, PackedWeight

BITS_OF: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
"""Types that NumPy has from ml_dtypes; their bytes are PyTorch's."""


def to_device(array: NDArray, device: torch.device) -> Tensor:
    """A copy of its own: arrays are views of mapped files."""
    kind = BITS_OF.get(array.dtype.name)
    if kind is None:
        return torch.from_numpy(np.array(array, order="C")).to(device)
    raw = np.array(array, order="C").view(np.uint8 if array.dtype.itemsize == 1 else np.uint16)
    return torch.from_numpy(raw).view(kind).to(device)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLevels:
    """`quant.packed.Levels` on the device."""

    values: Tensor
    super_scale: Tensor | None

    @staticmethod
    def of(levels: Levels, device: torch.device) -> DeviceLevels:
        supers = None if levels.super_scale is None else to_device(levels.super_scale, device)
        return DeviceLevels(to_device(levels.values, device), supers)

    def expand(self) -> Tensor:
        """`[..., out, groups] fp32`."""
        values = self.values.float()
        if self.super_scale is None:
            return values
        return (
            self.super_scale.float().repeat_interleave(
                values.shape[-1] // self.super_scale.shape[-1], dim=-1
            )
            * values
        )

    def take(self, index: Tensor | int) -> DeviceLevels:
        return DeviceLevels(
            self.values[index], None if self.super_scale is None else self.super_scale[index]
        )

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.super_scale is None else self.super_scale.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeight:
    """A weight `[..., out, in]` on the device. Plain floats have no scales; the rest is as in
    `PackedWeight`.
    """

    codes: Tensor
    width: int
    bits: int
    group: int = 0
    scales: DeviceLevels | None = None
    mins: DeviceLevels | None = None
    zero_point: int = 0
    nibbles: NibbleOrder = "pairs"
    lookup: Tensor | None = None
    inverse_permutation: Tensor | None = None
    is_scaled: bool = False
    """Products multiply with it as it is stored (`fp8.is_scaled`)."""

    @staticmethod
    def of(packed: PackedWeight, device: torch.device, dtype: torch.dtype) -> DeviceWeight:
        """Plain floats in `dtype`, everything else as packed."""
        codes = to_device(packed.codes, device)
        width = packed.shape[-1]
        if packed.is_float:
            return DeviceWeight(codes.to(dtype), width, packed.bits)
        permutation = packed.input_permutation
        return DeviceWeight(
            codes,
            width,
            packed.bits,
            packed.group,
            None if packed.scales is None else DeviceLevels.of(packed.scales, device),
            None if packed.mins is None else DeviceLevels.of(packed.mins, device),
            packed.zero_point,
            packed.nibbles,
            None if packed.lookup is None else to_device(packed.lookup, device),
            None if permutation is None else to_device(np.argsort(permutation), device),
            is_scaled(packed, device),
        )

    @staticmethod
    def joined(parts: Sequence[DeviceWeight]) -> DeviceWeight:
        """One below the other; only where `joins`."""
        scales = [part.scales.values for part in parts if part.scales is not None]
        codes = torch.cat([part._raw for part in parts]).view(parts[0].codes.dtype)
        return replace(
            parts[0], codes=codes, scales=DeviceLevels(torch.cat(scales), None) if scales else None
        )

    def joins(self, other: DeviceWeight) -> bool:
        """Whether both can be one weight, and so one product."""
        return (self.is_plain and other.is_plain) or (self.is_scaled and other.is_scaled)

    @property
    def is_plain(self) -> bool:
        return self.scales is None

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + sum(
            levels.num_bytes for levels in (self.scales, self.mins) if levels is not None
        )

    def take(self, index: Tensor | int) -> DeviceWeight:
        """Parts of the first axis: rows of a table, experts."""
        codes = self._raw[index].view(self.codes.dtype)
        if self.scales is None:
            return replace(self, codes=codes)
        mins = None if self.mins is None else self.mins.take(index)
        return replace(self, codes=codes, scales=self.scales.take(index), mins=mins)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x [T, in]` times the weight `[out, in]`, plus `bias [out]`: `[T, out]` in x's dtype."""
        if not self.is_scaled:
            return F.linear(x, self.floats(x.dtype), bias)
        assert self.scales is not None
        made = scaled_product(x, self.codes, self.scales.values)
        return (made if bias is None else made + bias).to(x.dtype)

    def floats(self, dtype: torch.dtype) -> Tensor:
        """`[..., out, in]`; what is packed is computed in fp32, then rounded."""
        if self.scales is None:
            return self.codes.to(dtype)
        values = self._values()
        missing = -values.shape[-1] % self.group
        if missing:
            values = F.pad(values, (0, missing))
        groups = values.view(*values.shape[:-1], -1, self.group)
        groups.mul_(self.scales.expand()[..., None])
        if self.mins is not None:
            groups.add_(self.mins.expand()[..., None])
        values = groups.flatten(-2)[..., : self.width]
        if self.inverse_permutation is not None:
            values = values[..., self.inverse_permutation]
        return values.to(dtype)

    @property
    def _raw(self) -> Tensor:
        """The codes; e4m3 ones, which not every PyTorch takes apart and joins, as bytes."""
        return self.codes.view(torch.uint8) if self.codes.dtype == E4M3 else self.codes

    def _values(self) -> Tensor:
        """What the codes stand for before scales and mins: a tensor of its own, `[..., out, in]
        fp32`.
        """
        codes = self._unpacked()
        if self.lookup is not None:
            return self.lookup[codes.long()]
        values = codes.float()
        return values.sub_(self.zero_point) if self.zero_point else values

    def _unpacked(self) -> Tensor:
        """One code an element."""
        if self.bits != 4:
            return self.codes
        low, high = self.codes & 0x0F, self.codes >> 4
        lead = self.codes.shape[:-1]
        if self.nibbles == "pairs":
            return torch.stack([low, high], dim=-1).reshape(*lead, self.width)
        split = (*lead, self.width // self.group, 1, self.group // 2)
        return torch.cat([low.reshape(split), high.reshape(split)], dim=-2).reshape(
            *lead, self.width
        )


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """What one Linear multiplies its rows with: weights that join are one, so that it is one
    product. `bias [sum of out]`.
    """

    parts: tuple[DeviceWeight, ...]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """`x [T, in]` to `[T, sum of out]`."""
        if len(self.parts) == 1:
            return self.parts[0].product(x, self.bias)
        made = torch.cat([part.product(x, None) for part in self.parts], dim=1)
        return made if self.bias is None else made + self.bias


class ProgramWeights:
    """Loads each weight of a Program once, and keeps it as its readers want it: matrices as they
    are packed, vectors in fp32.

    What ops read in a step is found by the identity of what the Program holds: hashing a weight's
    name and sources takes longer than a small product. `shared`: weights that more than one op
    reads; others are dropped where a merged product has a copy.
    """

    def __init__(
        self, load: LoadWeight, device: torch.device, dtype: torch.dtype, shared: Collection[Weight]
    ) -> None:
        self._load = load
        self._device = device
        self._dtype = dtype
        self._shared = shared
        self._matrices: dict[Weight, DeviceWeight] = {}
        self._vectors: dict[Weight, Tensor] = {}
        self._kept: dict[int, Any] = {}
        self._products: list[Product] = []

    def add_matrix(self, weight: Weight) -> None:
        self._kept[id(weight)] = self._matrix(weight)

    def add_vector(self, weight: Weight) -> None:
        """In fp32, whatever it is."""
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
        """Numbers of an op, in fp64."""
        self._kept[id(owner)] = torch.tensor(values, dtype=torch.float64, device=self._device)

    def matrix(self, weight: Weight) -> DeviceWeight:
        found: DeviceWeight = self._kept[id(weight)]
        return found

    def vector(self, weight: Weight) -> Tensor:
        found: Tensor = self._kept[id(weight)]
        return found

    def product(self, linear: Linear) -> Product:
        found: Product = self._kept[id(linear)]
        return found

    def constant(self, owner: object) -> Tensor:
        found: Tensor = self._kept[id(owner)]
        return found

    @property
    def num_bytes(self) -> int:
        merged = [part for product in self._products for part in product.parts]
        held = {id(weight): weight.num_bytes for weight in [*self._matrices.values(), *merged]}
        vectors = sum(vector.nbytes for vector in self._vectors.values())
        return (
            sum(held.values())
            + vectors
            + sum(product.bias.nbytes for product in self._products if product.bias is not None)
        )

    def _matrix(self, weight: Weight) -> DeviceWeight:
        if weight not in self._matrices:
            self._matrices[weight] = DeviceWeight.of(
                self._packed(weight), self._device, self._dtype
            )
        return self._matrices[weight]

    def _vector(self, weight: Weight) -> Tensor:
        if weight not in self._vectors:
            self._vectors[weight] = to_device(self._packed(weight).dequantize(), self._device)
        return self._vectors[weight]

    def _bias(self, linear: Linear) -> Tensor:
        """Zeros where a slice has none."""
        pairs = zip(linear.weights_, linear.biases, strict=True)
        parts = [
            torch.zeros(w.shape[0]) if b is None else torch.from_numpy(self._packed(b).dequantize())
            for w, b in pairs
        ]
        return torch.cat(parts).to(self._device, self._dtype)

    def _packed(self, weight: Weight) -> PackedWeight:
        packed = self._load(weight).packed()
        if packed.shape != weight.shape:
            raise WeightMismatch(f"{weight.name} has shape {packed.shape}, expected {weight.shape}")
        return packed
