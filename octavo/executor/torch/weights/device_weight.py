"""One weight on a PyTorch device: stored packed as in `quant.packed`, converted to floats when a
matmul reads it.

Bit for bit equal to `PackedWeight.dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.torch.weights.fp8 import E4M3, as_e4m3, is_scaled, scaled_product
from octavo.quant.packed import Levels, NibbleOrder, PackedWeight

BITS_OF: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
"""PyTorch dtypes for NumPy's ml_dtypes; the bytes are the same."""


LinearFn = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes x `[T, in]` @ `weight [out, in]`^T + `bias [out]`."""


def to_device(array: NDArray, device: torch.device) -> Tensor:
    """Copies an array to the device. Always copies, because arrays may be views of mapped files."""
    kind = BITS_OF.get(array.dtype.name)
    if kind is None:
        return torch.from_numpy(np.array(array, order="C")).to(device)
    raw = np.array(array, order="C").view(np.uint8 if array.dtype.itemsize == 1 else np.uint16)
    return torch.from_numpy(raw).view(kind).to(device)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLevels:
    """`quant.packed.Levels` on the device: scales or mins of groups."""

    values: Tensor
    super_scale: Tensor | None

    @staticmethod
    def of(levels: Levels, device: torch.device) -> DeviceLevels:
        supers = None if levels.super_scale is None else to_device(levels.super_scale, device)
        return DeviceLevels(to_device(levels.values, device), supers)

    def expand(self) -> Tensor:
        """Returns the levels of all groups, `[..., out, groups] fp32`."""
        values = self.values.float()
        if self.super_scale is None:
            return values
        return (
            self.super_scale.float().repeat_interleave(
                values.shape[-1] // self.super_scale.shape[-1], dim=-1
            )
            * values
        )

    @staticmethod
    def joined(parts: Sequence[DeviceLevels | None]) -> DeviceLevels | None:
        """Stacks levels of the same form; None if there are none."""
        levels = [part for part in parts if part is not None]
        if not levels:
            return None
        supers = [level.super_scale for level in levels if level.super_scale is not None]
        values = torch.cat([level.values for level in levels])
        return DeviceLevels(values, torch.cat(supers) if supers else None)

    @property
    def form(self) -> tuple[object, ...]:
        """Everything but the values and the number of outputs."""
        tensors = (self.values, self.super_scale)
        return tuple((t.dtype, t.shape[1:]) for t in tensors if t is not None)

    def take(self, index: Tensor | int) -> DeviceLevels:
        return DeviceLevels(
            self.values[index], None if self.super_scale is None else self.super_scale[index]
        )

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.super_scale is None else self.super_scale.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeight:
    """A weight `[..., out, in]` on the device; plain floats have no scales, other fields are as in
    `PackedWeight`.
    """

    codes: Tensor
    width: int
    bits: int
    group: int = 0
    scales: DeviceLevels | None = None
    mins: DeviceLevels | None = None
    zeros: Tensor | None = None
    zero_point: int = 0
    nibbles: NibbleOrder = "pairs"
    lookup: Tensor | None = None
    inverse_permutation: Tensor | None = None
    is_scaled: bool = False
    """Whether matmuls use the stored codes directly (`fp8.is_scaled`)."""
    whole_outputs: int = 0
    """Outputs of the complete weight, if this is a rank's part; 0: all are here."""

    @staticmethod
    def of(
        packed: PackedWeight, device: torch.device, dtype: torch.dtype, whole_outputs: int = 0
    ) -> DeviceWeight:
        """Copies a weight to the device: plain floats as `dtype`, others packed."""
        codes = to_device(packed.codes, device)
        width = packed.shape[-1]
        if packed.is_float:
            return DeviceWeight(codes.to(dtype), width, packed.bits, whole_outputs=whole_outputs)
        permutation = packed.input_permutation
        return DeviceWeight(
            codes=codes,
            width=width,
            bits=packed.bits,
            group=packed.group,
            scales=None if packed.scales is None else DeviceLevels.of(packed.scales, device),
            mins=None if packed.mins is None else DeviceLevels.of(packed.mins, device),
            zeros=None if packed.zeros is None else to_device(packed.zeros, device),
            zero_point=packed.zero_point,
            nibbles=packed.nibbles,
            lookup=None if packed.lookup is None else to_device(packed.lookup, device),
            inverse_permutation=None
            if permutation is None
            else to_device(np.argsort(permutation), device),
            is_scaled=is_scaled(packed, device),
            whole_outputs=whole_outputs,
        )

    @staticmethod
    def joined(parts: Sequence[DeviceWeight]) -> DeviceWeight:
        """Stacks weights that are compatible by `joins`."""
        codes = torch.cat([part._raw for part in parts]).view(parts[0].codes.dtype)
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return replace(
            parts[0],
            codes=codes,
            scales=DeviceLevels.joined([part.scales for part in parts]),
            mins=DeviceLevels.joined([part.mins for part in parts]),
            zeros=torch.cat(zeros) if zeros else None,
            whole_outputs=sum(part.tiled_outputs for part in parts),
        )

    @property
    def tiled_outputs(self) -> int:
        """Number of outputs that tiles are chosen for: those of the complete weight, so that every
        rank sums in the order of a single one.
        """
        return self.whole_outputs or self.codes.shape[-2]

    def joins(self, other: DeviceWeight) -> bool:
        """Returns whether two weights can be joined into one matmul."""
        if self.is_plain or other.is_plain:
            return self.is_plain and other.is_plain
        mixed = any(weight.inverse_permutation is not None for weight in (self, other))
        return not mixed and self._form == other._form and _same(self.lookup, other.lookup)

    @property
    def _form(self) -> tuple[object, ...]:
        """Everything but the values and the number of outputs."""
        levels = tuple(None if level is None else level.form for level in (self.scales, self.mins))
        zeros = None if self.zeros is None else self.zeros.dtype
        codes = (self.codes.dtype, self.codes.shape[1:])
        kind = (self.width, self.bits, self.group, self.zero_point, self.nibbles, self.is_scaled)
        return (*kind, codes, levels, zeros)

    @property
    def is_plain(self) -> bool:
        return self.scales is None

    @property
    def num_bytes(self) -> int:
        levels = [one.num_bytes for one in (self.scales, self.mins) if one is not None]
        return self.codes.nbytes + sum(levels) + (0 if self.zeros is None else self.zeros.nbytes)

    def take(self, index: Tensor | int) -> DeviceWeight:
        """Selects along the first axis: rows of a table, or experts."""
        codes = self._raw[index].view(self.codes.dtype)
        if self.scales is None:
            return replace(self, codes=codes)
        mins = None if self.mins is None else self.mins.take(index)
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(self, codes=codes, scales=self.scales.take(index), mins=mins, zeros=zeros)

    def product(self, x: Tensor, bias: Tensor | None, linear: LinearFn = F.linear) -> Tensor:
        """Computes x `[T, in]` @ weight^T + `bias [out]`: `[T, out]` in x's dtype."""
        if not self.is_scaled:
            return linear(x, self.floats(x.dtype), bias)
        return self.scaled_product(*as_e4m3(x.float()), bias, x.dtype)

    def scaled_product(
        self, rows: Tensor, row_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Computes the product of quantized rows (`fp8.as_e4m3`), `[T, out]` in `dtype`."""
        assert self.scales is not None
        return scaled_product(
            rows, row_scales, self.codes, self.scales.values, bias=bias, dtype=dtype
        )

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight as floats, `[..., out, in]`; packed weights are dequantized in fp32,
        then rounded.
        """
        if self.scales is None:
            return self.codes.to(dtype)
        values = self._values()
        missing = -values.shape[-1] % self.group
        if missing:
            values = F.pad(values, (0, missing))
        groups = values.view(*values.shape[:-1], -1, self.group)
        if self.zeros is not None:
            groups.sub_(self.zeros.float()[..., None])
        groups.mul_(self.scales.expand()[..., None])
        if self.mins is not None:
            groups.add_(self.mins.expand()[..., None])
        values = groups.flatten(-2)[..., : self.width]
        if self.inverse_permutation is not None:
            values = values[..., self.inverse_permutation]
        return values.to(dtype)

    @property
    def _raw(self) -> Tensor:
        """The codes, with e4m3 viewed as bytes because not every PyTorch can index and concatenate
        e4m3.
        """
        return self.codes.view(torch.uint8) if self.codes.dtype == E4M3 else self.codes

    def _values(self) -> Tensor:
        """Returns the codes' values before scales and mins, as a new tensor `[..., out, in]
        fp32`.
        """
        codes = self._unpack()
        if self.lookup is not None:
            return self.lookup[codes.long()]
        values = codes.float()
        return values.sub_(self.zero_point) if self.zero_point else values

    def _unpack(self) -> Tensor:
        """Returns one code per element."""
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


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
