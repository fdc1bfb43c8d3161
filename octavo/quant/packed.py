"""The packed weight: every quantized or plain tensor takes this form before a backend tiles it.

Defines codes, scales, mins and the formula that combines them; `checkpoint/` and `quant/gguf.py`
create it. Lossless: `dequantize()` equals the format's reference dequantization bit for bit, in
float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Code = Literal["int", "uint", "fp16", "bf16", "fp32", "e4m3", "e5m2", "e2m1", "lookup"]
ActivationScheme = Literal["none", "per_token", "per_group", "static"]
NibbleOrder = Literal["pairs", "halves"]

FLOAT_TYPES: dict[Code, np.dtype] = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Scales or mins of the groups, on one level or two (k-quants).

    One level: floats in `values` (fp16, bf16 or fp32). Two levels: float32(super_scale) *
    float32(values), with small integers in `values`; each super-scale covers `groups / supers`
    neighbouring groups.
    """

    values: NDArray
    """`[..., out, groups]`"""
    super_scale: NDArray | None = None
    """`[..., out, supers]`; None: one level."""

    def expand(self) -> NDArray[np.float32]:
        """Returns the values, `[..., out, groups] fp32`."""
        values = self.values.astype(np.float32)
        if self.super_scale is None:
            return values
        repeat = values.shape[-1] // self.super_scale.shape[-1]
        return np.repeat(self.super_scale.astype(np.float32), repeat, axis=-1) * values

    @property
    def span(self) -> int:
        """Neighbouring groups per super-scale; 1 without super-scales."""
        return (
            1
            if self.super_scale is None
            else int(self.values.shape[-1] // self.super_scale.shape[-1])
        )

    def groups(self, group: int, first: int, last: int) -> Levels:
        """Returns the levels of inputs `first` to `last - 1`, in groups of `group`."""
        own = slice(first // group, -(-last // group))
        if self.super_scale is None:
            return Levels(self.values[..., own])
        supers = slice(first // group // self.span, -(-last // (group * self.span)))
        return Levels(self.values[..., own], self.super_scale[..., supers])

    def matrix(self, index: int | slice) -> Levels:
        supers = None if self.super_scale is None else self.super_scale[index]
        return Levels(self.values[index], supers)

    def rows(self, index: slice | NDArray[np.intp]) -> Levels:
        return Levels(
            self.values[..., index, :],
            None if self.super_scale is None else self.super_scale[..., index, :],
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight `[..., out, in]` (or `[n]`, floats only) as codes and the numbers that give them
    meaning.

    `bits` 16 and 32 are plain floats: `codes [..., out, in]` of the dtype that `code` names,
    nothing else set. `bits` 8 or fewer: value = (code - zero_point - zero) * scale + min, in
    float32, per group of `group` neighbouring inputs (a last group may be shorter). `codes` is
    - bits 5, 6, 8: `[..., out, in]`, one code per byte: int8 if `code` is "int", uint8 if "uint",
      float8_e4m3fn if "e4m3";
    - bits 4: `[..., out, in / 2] uint8`, low nibble first. `nibbles` "pairs": byte j holds inputs
      2j and 2j+1; "halves": within each group the byte j holds inputs j and j + group/2 (GGUF's
      order). Arrays may be strided views into a mapped file. `lookup [16] fp32` contains the values
      of 4-bit codes if `code` is "lookup" (NF4, MXFP4's e2m1). `activation` is how a kernel may
      quantize the activations; with "none" they must be floats.
    """

    shape: tuple[int, ...]
    bits: int
    code: Code
    codes: NDArray
    group: int = 0
    scales: Levels | None = None
    mins: Levels | None = None
    zeros: NDArray[np.int8] | None = None
    """Additional zero of each group, `[..., out, groups]`; None: zero."""
    zero_point: int = 0
    """Zero of all groups; 0 for codes of fewer than 8 bits with mins."""
    nibbles: NibbleOrder = "pairs"
    lookup: NDArray[np.float32] | None = None
    input_permutation: NDArray[np.int32] | None = None
    activation: ActivationScheme = "none"

    @staticmethod
    def plain(array: NDArray) -> PackedWeight:
        """Wraps an fp32, fp16 or bf16 tensor."""
        for code, dtype in FLOAT_TYPES.items():
            if array.dtype == dtype:
                return PackedWeight(array.shape, dtype.itemsize * 8, code, array)
        raise TypeError(f"a plain weight is fp32, fp16 or bf16, got {array.dtype}")

    def packed(self) -> PackedWeight:
        """Returns the weight itself; counterpart of `BlockWeight.packed`."""
        return self

    @property
    def is_float(self) -> bool:
        return self.bits >= 16

    @property
    def has_whole_lookup(self) -> bool:
        """Whether all lookup values are integers that fit a signed byte."""
        if self.lookup is None:
            return False
        return bool((self.lookup == self.lookup.astype(np.int8)).all())

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, zeros, scales and mins."""
        arrays = [self.codes] + ([] if self.zeros is None else [self.zeros])
        for levels in (self.scales, self.mins):
            if levels is not None:
                arrays += [levels.values] + (
                    [] if levels.super_scale is None else [levels.super_scale]
                )
        return sum(array.nbytes for array in arrays)

    def unpacked_codes(self) -> NDArray:
        """Returns codes `[..., out, in]`, one per element (uint8 or int8; floats unchanged)."""
        if self.bits != 4:
            return self.codes
        low, high = self.codes & 0x0F, self.codes >> 4
        if self.nibbles == "pairs":
            return np.stack([low, high], axis=-1).reshape(*self.codes.shape[:-1], self.shape[-1])
        half = self.group // 2
        split = (*self.codes.shape[:-1], self.shape[-1] // self.group, 1, half)
        return np.concatenate([low.reshape(split), high.reshape(split)], axis=-2).reshape(
            *self.codes.shape[:-1], self.shape[-1]
        )

    def dequantize(self) -> NDArray[np.float32]:
        """Returns the values `[..., out, in] fp32`, bit for bit equal to the format's reference."""
        if self.is_float:
            return self.codes.astype(np.float32)
        assert self.scales is not None
        codes = self.unpacked_codes()
        values = (
            self.lookup[codes]
            if self.lookup is not None
            else codes.astype(np.float32) - np.float32(self.zero_point)
        )
        if self.zeros is not None:
            values = values - self._each(self.zeros)
        # Scales of a damaged file are kept, even NaN or infinity.
        with np.errstate(invalid="ignore", over="ignore"):
            values = values * self._spread(self.scales)
            if self.mins is not None:
                values = values + self._spread(self.mins)
        if self.input_permutation is not None:
            values = values[..., np.argsort(self.input_permutation)]
        return np.asarray(values, np.float32)

    def _spread(self, levels: Levels) -> NDArray[np.float32]:
        """Repeats each group's value for its inputs: `[..., out, in] fp32`."""
        return self._each(levels.expand())

    def _each(self, numbers: NDArray) -> NDArray:
        return np.repeat(numbers, self.group, axis=-1)[..., : self.shape[-1]]

    def rows(self, index: slice | NDArray[np.intp]) -> PackedWeight:
        """Returns the chosen output rows, lossless for any choice and order."""
        if len(self.shape) == 1 and not self.is_float:
            return PackedWeight.plain(self.dequantize()[index])
        if len(self.shape) == 1:
            picked = self.codes[index]
            return replace(self, shape=picked.shape, codes=picked)
        codes = self.codes[..., index, :]
        return replace(
            self,
            shape=(*self.shape[:-2], codes.shape[-2], self.shape[-1]),
            codes=codes,
            scales=None if self.scales is None else self.scales.rows(index),
            mins=None if self.mins is None else self.mins.rows(index),
            zeros=None if self.zeros is None else self.zeros[..., index, :],
        )

    def matrix(self, index: int) -> PackedWeight:
        return replace(
            self,
            shape=self.shape[1:],
            codes=self.codes[index],
            scales=None if self.scales is None else self.scales.matrix(index),
            mins=None if self.mins is None else self.mins.matrix(index),
            zeros=None if self.zeros is None else self.zeros[index],
        )

    def matrices(self, first: int, last: int) -> PackedWeight:
        """Returns the stacked matrices, or rows of stacked vectors, `first` to `last - 1`."""
        some = slice(first, last)
        return replace(
            self,
            shape=(last - first, *self.shape[1:]),
            codes=self.codes[some],
            scales=None if self.scales is None else self.scales.matrix(some),
            mins=None if self.mins is None else self.mins.matrix(some),
            zeros=None if self.zeros is None else self.zeros[some],
        )

    def inputs(self, first: int, last: int) -> PackedWeight:
        """Returns the inputs `first` to `last - 1`, which must start and end at a group boundary; a
        single group of all inputs may be split anywhere.
        """
        width = self.shape[-1]
        if self.is_float:
            return replace(
                self, shape=(*self.shape[:-1], last - first), codes=self.codes[..., first:last]
            )
        one_group = self.group >= width and self.bits != 4
        unit = 1 if one_group else self._input_unit
        if first % unit or (last % unit and last != width) or self.input_permutation is not None:
            raise ValueError(
                f"inputs {first} to {last} cannot be cut from a weight of groups of {unit}"
            )
        step = 2 if self.bits == 4 else 1
        return replace(
            self,
            shape=(*self.shape[:-1], last - first),
            codes=self.codes[..., first // step : -(-last // step)],
            group=last - first if one_group else self.group,
            scales=None if self.scales is None else self.scales.groups(self.group, first, last),
            mins=None if self.mins is None else self.mins.groups(self.group, first, last),
            zeros=None
            if self.zeros is None
            else self.zeros[..., first // self.group : -(-last // self.group)],
        )

    @property
    def _input_unit(self) -> int:
        """Inputs per super-scale."""
        supers = [levels.span for levels in (self.scales, self.mins) if levels is not None]
        return self.group * max(supers, default=1)
