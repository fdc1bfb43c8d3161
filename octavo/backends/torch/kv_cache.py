"""The KV bytes of the torch backend: per cache group K and V of all layers, and one block more, which padded rows write to.

Knows whole blocks; what lies in them only attention and `KvWrite` know. Swapped blocks pass through pinned memory on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.base import BLOCK_SIZE, KvLayout
from octavo.program.program import CacheGroup


@dataclass(frozen=True, slots=True, eq=False)
class GroupTensors:
    """`k [L, blocks + 1, 16, K, k_width]`, `v [L, blocks + 1, 16, K, v_width]` of one cache group."""

    k: Tensor
    v: Tensor

    @property
    def num_blocks(self) -> int:
        """Those that are given out."""
        return self.k.shape[1] - 1


def layout_of(group: CacheGroup, dtype: torch.dtype) -> KvLayout:
    numbers = BLOCK_SIZE * group.num_kv_heads * (group.k_width + group.v_width)
    return KvLayout(numbers * dtype.itemsize, group.num_layers, "bf16" if dtype == torch.bfloat16 else "fp32")


class TorchKvCache:
    """Implements `base.KvCache`."""

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.groups = [_group_tensors(group, count, dtype, device) for group, count in zip(groups, num_blocks, strict=True)]
        sizes = [layout_of(group, dtype).block_bytes for group in groups]
        self._host = torch.empty(max(sizes, default=0), dtype=torch.uint8, pin_memory=device.type == "cuda")

    @property
    def num_blocks(self) -> list[int]:
        """By group."""
        return [group.num_blocks for group in self.groups]

    def copy_block(self, group: int, source: int, target: int) -> None:
        for tensor in (self.groups[group].k, self.groups[group].v):
            tensor[:, target] = tensor[:, source]

    def read_block(self, group: int, block_id: int, into: NDArray[np.uint8]) -> None:
        host = self._host[: len(into)]
        for tensor, part in zip(self._block(group, block_id), self._parts(group, host), strict=True):
            part.copy_(tensor.reshape(-1).view(torch.uint8))
        into[:] = host.numpy()

    def write_block(self, group: int, block_id: int, data: NDArray[np.uint8]) -> None:
        host = self._host[: len(data)]
        host.numpy()[:] = data
        for tensor, part in zip(self._block(group, block_id), self._parts(group, host), strict=True):
            tensor.copy_(part.to(tensor.device).view(tensor.dtype).view(tensor.shape))

    def _block(self, group: int, block_id: int) -> tuple[Tensor, Tensor]:
        """Views `[L, 16, K, width]`."""
        tensors = self.groups[group]
        return tensors.k[:, block_id], tensors.v[:, block_id]

    def _parts(self, group: int, block: Tensor) -> tuple[Tensor, Tensor]:
        """K's bytes and V's."""
        k = self.groups[group].k
        size = k[:, 0].numel() * k.itemsize
        return block[:size], block[size:]


def _group_tensors(group: CacheGroup, num_blocks: int, dtype: torch.dtype, device: torch.device) -> GroupTensors:
    shape = (group.num_layers, num_blocks + 1, BLOCK_SIZE, group.num_kv_heads)
    return GroupTensors(
        torch.zeros((*shape, group.k_width), dtype=dtype, device=device),
        torch.zeros((*shape, group.v_width), dtype=dtype, device=device),
    )
