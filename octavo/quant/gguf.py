"""GGUF's tensor types: byte layout of codes, scales and mins in each block type, lossless.

Source: block structs in ggml's `ggml-common.h`; tests compare with gguf-py's `dequantize`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from octavo.quant.blocks import BlockLayout, BlockWeight, Bytes, Numbers, Plane, StoredWeight
from octavo.quant.gguf_codes import CODE_LAYOUTS, CodeLayout
from octavo.quant.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type: `block_bytes` bytes hold `block_size` neighbouring inputs.

    Plain floats have a `dtype`, directly readable blocks a `layout`, other types `codes` that are
    decoded when read.
    """

    name: str
    block_size: int
    block_bytes: int
    dtype: np.dtype | None = None
    layout: BlockLayout | None = None
    codes: CodeLayout | None = None

    @property
    def form(self) -> str:
        """Name of the format that backends see."""
        return self.name if self.codes is None else self.codes.form

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) // self.block_size * self.block_bytes

    def tensor(self, raw: Bytes, shape: tuple[int, ...]) -> StoredWeight:
        """Returns a view of `raw [num_bytes(shape)]`; `shape[-1]` must be a multiple of the block
        size.
        """
        if self.dtype is not None:
            return PackedWeight.plain(raw.view(self.dtype).reshape(shape))
        if self.codes is not None:
            return self.codes.weight(raw, shape, (self.block_size, self.block_bytes))
        assert self.layout is not None
        blocks = raw.reshape(*shape[:-1], shape[-1] // self.block_size, self.block_bytes)
        return BlockWeight(blocks, self.block_size, self.layout)


_D, _SECOND = Numbers(0), Numbers(2)


def _two_levels(*planes: Plane) -> BlockLayout:
    return BlockLayout(
        planes, Numbers(4, "scales6"), Numbers(4, "mins6"), super_scales=_D, super_mins=_SECOND
    )


BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, dtype=np.dtype(np.float32)),
    1: BlockType("F16", 1, 2, dtype=np.dtype(np.float16)),
    2: BlockType("Q4_0", 32, 18, layout=BlockLayout((Plane(2, 4, 16),), _D, zero_point=8)),
    3: BlockType("Q4_1", 32, 20, layout=BlockLayout((Plane(4, 4, 16),), _D, _SECOND)),
    6: BlockType(
        "Q5_0", 32, 22, layout=BlockLayout((Plane(6, 4, 16), Plane(2, 1, 1)), _D, zero_point=16)
    ),
    7: BlockType(
        "Q5_1", 32, 24, layout=BlockLayout((Plane(8, 4, 16), Plane(4, 1, 1)), _D, _SECOND)
    ),
    8: BlockType("Q8_0", 32, 34, layout=BlockLayout((Plane(2, 8, 32),), _D)),
    12: BlockType("Q4_K", 256, 144, layout=_two_levels(Plane(16, 4, 32))),
    13: BlockType("Q5_K", 256, 176, layout=_two_levels(Plane(48, 4, 32), Plane(16, 1, 32))),
    14: BlockType(
        "Q6_K",
        256,
        210,
        layout=BlockLayout(
            (Plane(0, 4, 64), Plane(128, 2, 32)),
            Numbers(192, "int8", 16),
            super_scales=Numbers(208),
            zero_point=32,
        ),
    ),
    30: BlockType("BF16", 1, 2, dtype=np.dtype(ml_dtypes.bfloat16)),
    10: BlockType(
        "Q2_K",
        256,
        84,
        layout=BlockLayout(
            (Plane(16, 2, 32),),
            Numbers(0, "scales4"),
            Numbers(0, "mins4"),
            super_scales=Numbers(80),
            super_mins=Numbers(82),
        ),
    ),
    11: BlockType(
        "Q3_K",
        256,
        110,
        layout=BlockLayout(
            (Plane(32, 2, 32), Plane(0, 1, 32)),
            Numbers(96, "signed6"),
            super_scales=Numbers(108),
            zero_point=4,
        ),
    ),
    **{
        number: BlockType(name, size, num_bytes, codes=CODE_LAYOUTS[name])
        for number, name, size, num_bytes in (
            (16, "IQ2_XXS", 256, 66),
            (17, "IQ2_XS", 256, 74),
            (18, "IQ3_XXS", 256, 98),
            (19, "IQ1_S", 256, 50),
            (20, "IQ4_NL", 32, 18),
            (21, "IQ3_S", 256, 110),
            (22, "IQ2_S", 256, 82),
            (23, "IQ4_XS", 256, 136),
            (29, "IQ1_M", 256, 56),
            (34, "TQ1_0", 256, 54),
            (35, "TQ2_0", 256, 66),
            (39, "MXFP4", 32, 17),
            (40, "NVFP4", 64, 36),
        )
    },
}
