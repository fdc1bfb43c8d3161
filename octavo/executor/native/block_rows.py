"""Reads the native backend's KV blocks back into arrays by token.

Layout: one piece per kv head, keys then values (`docs/concepts/kernels.md`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.executor.kv import BLOCK_SIZE, BlockRows, KvLayout


def block_rows(layout: KvLayout, blocks: NDArray[np.uint8]) -> BlockRows:
    """Returns the keys and values in `blocks [B, block_bytes]` of one layer in fp32 or bf16."""
    group = layout.group
    assert group.num_layers == 1 and layout.dtype in ("fp32", "bf16"), "others are not asked for"
    numbers = _floats(blocks, layout.dtype).reshape(len(blocks), group.num_kv_heads, -1)
    num_keys = BLOCK_SIZE * group.k_width
    shape = (len(blocks), group.num_kv_heads)
    k, v = numbers[:, :, :num_keys], numbers[:, :, num_keys : num_keys + BLOCK_SIZE * group.v_width]
    if layout.dtype == "fp32":
        by_token = k.reshape(*shape, group.k_width, BLOCK_SIZE).swapaxes(2, 3)
        values = v.reshape(*shape, BLOCK_SIZE, group.v_width)
    else:
        pairs = k.reshape(*shape, group.k_width // 2, BLOCK_SIZE, 2)
        by_token = pairs.swapaxes(2, 3).reshape(*shape, BLOCK_SIZE, group.k_width)
        pairs = v.reshape(*shape, BLOCK_SIZE // 2, group.v_width, 2)
        values = pairs.swapaxes(3, 4).reshape(*shape, BLOCK_SIZE, group.v_width)
    return BlockRows(by_token.swapaxes(1, 2), values.swapaxes(1, 2))


def _floats(blocks: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    if dtype == "fp32":
        return np.ascontiguousarray(blocks).view(np.float32)
    wide = np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32)
