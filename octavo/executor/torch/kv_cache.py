"""KV memory of the torch backend: K and V of all layers per cache group, plus a spare block for
padded rows.

Attention and `KvWrite` access the contents, `BlockCopies` moves complete blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.kv import BLOCK_SIZE, STATES_A_BLOCK, HeadRows, KvLayout
from octavo.executor.torch.block_copies import BlockCopies
from octavo.executor.torch.streams import make_streams
from octavo.executor.torch.weights.fp8 import E4M3, as_e4m3
from octavo.program.program import CacheGroup

NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
    E4M3: "fp8",
}
"""Name of each KV dtype."""

DTYPES = {name: dtype for dtype, name in NAMES.items()}

CODES = (torch.int8, E4M3)
"""Dtypes stored as codes with a scale per token and head."""


@dataclass(frozen=True, slots=True, eq=False)
class KvTensor:
    """K or V of one layer, or of all layers with a leading axis L."""

    numbers: Tensor
    """`[(L,) blocks + 1, 16, K, width]`"""
    scales: Tensor | None = None
    """Scales of int8 and e4m3 codes, `[(L,) blocks + 1, 16, K] bf16`."""

    def layer(self, layer: int) -> KvTensor:
        return KvTensor(self.numbers[layer], None if self.scales is None else self.scales[layer])

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Writes `rows [T, K, width]` to slots of one layer."""
        if self.scales is None:
            self.numbers.flatten(0, 1).index_copy_(0, slots, rows.to(self.numbers.dtype))
            return
        codes, scales = (as_int8 if self.numbers.dtype == torch.int8 else _as_fp8)(rows.float())
        self.raw.flatten(0, 1).index_copy_(0, slots, codes.view(self.raw.dtype))
        self.scales.flatten(0, 1).index_copy_(0, slots, scales)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies slots of one layer as stored."""
        for tensor in (self.raw, self.scales):
            if tensor is not None:
                flat = tensor.flatten(0, 1)
                flat.index_copy_(0, targets, flat[sources])

    def read(self, tables: Tensor) -> Tensor:
        """Reads the blocks `tables [N, B]` of one layer: `[N, B * 16, K, width]` as stored, codes
        as fp32.
        """
        numbers = self.raw[tables].flatten(1, 2).view(self.numbers.dtype)
        return (
            numbers
            if self.scales is None
            else numbers.float() * self.scales[tables].flatten(1, 2)[..., None].float()
        )

    @property
    def raw(self) -> Tensor:
        """The stored numbers, with e4m3 viewed as bytes: not every device can index e4m3, and
        Triton reads it on few.
        """
        return self.numbers.view(torch.uint8) if self.numbers.dtype == E4M3 else self.numbers

    @property
    def tensors(self) -> list[Tensor]:
        return [self.numbers] if self.scales is None else [self.numbers, self.scales]


def as_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 codes and scales of `rows [..., width] fp32`, like `reference.as_int8`."""
    absmax = (
        rows.abs().amax(dim=-1, keepdim=True)
        if rows.shape[-1]
        else rows.new_zeros(*rows.shape[:-1], 1)
    )
    scales = torch.where(absmax.isfinite(), absmax / 127, torch.nan).bfloat16()
    wide = scales.float()
    codes = torch.where(wide > 0, torch.round(rows / wide).clamp(-127, 127), 0.0)
    return codes.to(torch.int8), scales[..., 0]


def _as_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns e4m3 codes and scales of `rows [..., width] fp32`, like `reference.as_fp8`."""
    codes, scales = as_e4m3(rows, torch.bfloat16)
    return codes, scales[..., 0]


@dataclass(frozen=True, slots=True, eq=False)
class GroupTensors:
    """K and V of one cache group, all layers.

    For groups of kind `state`: states `[L, blocks + 1, 2, H, P, N]` and the number of tokens that
    each covers, `[L, blocks + 1, 2]`.
    """

    k: KvTensor
    v: KvTensor

    @property
    def num_blocks(self) -> int:
        """Usable blocks, without the spare block."""
        return self.k.numbers.shape[1] - 1

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors `[L, blocks + 1, ...]` that make up a block's bytes, in this order."""
        return [*self.k.tensors, *self.v.tensors]


def make_kv_layout(group: CacheGroup, dtype: torch.dtype) -> KvLayout:
    """Returns the layout of a group stored as `dtype`; convolution rows and states are
    always fp32.
    """
    if group.kind in ("conv", "state"):
        dtype = torch.float32
    if group.kind == "state":
        numbers = STATES_A_BLOCK * group.num_kv_heads * group.k_width * group.v_width
        sizes = (numbers * dtype.itemsize, STATES_A_BLOCK * dtype.itemsize)
        states = [HeadRows(group.num_layers, size) for size in sizes]
        return KvLayout(group, NAMES[dtype], sizes, tuple(states))
    scales = (torch.bfloat16.itemsize,) if dtype in CODES else ()
    k, v = (width * dtype.itemsize for width in (group.k_width, group.v_width))
    rows = [HeadRows(BLOCK_SIZE * group.num_layers, size) for size in (k, *scales, v, *scales)]
    pieces = [BLOCK_SIZE * group.num_kv_heads * row.head_bytes for row in rows]
    return KvLayout(group, NAMES[dtype], tuple(pieces), tuple(rows))


class TorchKvCache:
    """The KV cache on one device. Implements `base.BatchedKvCache`."""

    def __init__(
        self,
        layouts: Sequence[KvLayout],
        num_blocks: Sequence[int],
        device: torch.device,
    ) -> None:
        self.groups = [
            _group_tensors(layout.group, count, DTYPES[layout.dtype], device)
            for layout, count in zip(layouts, num_blocks, strict=True)
        ]
        self.copies = BlockCopies([group.tensors for group in self.groups], make_streams(device))

    @property
    def num_blocks(self) -> list[int]:
        return [group.num_blocks for group in self.groups]

    def copy_block(self, group: int, source: int, target: int) -> None:
        self.copies.copy(group, [(source, target)])

    def read_block(self, group: int, block_id: int, into: NDArray[np.uint8]) -> None:
        self.copies.read(group, [block_id], [into])
        self.copies.settle()

    def write_block(self, group: int, block_id: int, data: NDArray[np.uint8]) -> None:
        self.copies.write(group, [block_id], [data])
        self.copies.settle()


def _group_tensors(
    group: CacheGroup, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> GroupTensors:
    if group.kind == "state":
        counts = (group.num_layers, num_blocks + 1, STATES_A_BLOCK)
        heads = (group.num_kv_heads, group.k_width, group.v_width)
        states = _zeros((*counts, *heads), dtype, device)
        return GroupTensors(KvTensor(states), KvTensor(_zeros(counts, dtype, device)))
    shape = (group.num_layers, num_blocks + 1, BLOCK_SIZE, group.num_kv_heads)

    def stored(width: int) -> KvTensor:
        scales = _zeros(shape, torch.bfloat16, device) if dtype in CODES else None
        return KvTensor(_zeros((*shape, width), dtype, device), scales)

    return GroupTensors(stored(group.k_width), stored(group.v_width))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros. On a CPU the memory is committed page by page when written, unlike
    `torch.zeros`.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
        .view(dtype)
        .view(shape)
    )
