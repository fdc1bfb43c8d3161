"""Every GGUF block type is dequantised bitwise as gguf-py does."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from octavo.quant.gguf import BLOCK_TYPES

QUANTISED = [number for number, kind in BLOCK_TYPES.items() if kind.dtype is None]

HALVES = {
    "Q6_K": [208],
    "Q4_0": [0],
    "Q5_0": [0],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "IQ1_M": [54],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "MXFP4": [],
    "NVFP4": [],
}
"""Places of the fp16 numbers of a block; bytes 0 and 2 of other types."""


def random_blocks(number: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Draws random bytes whose fp16 fields are finite (their top exponent bit is cleared)."""
    kind = BLOCK_TYPES[number]
    raw = (
        np.random.default_rng(seed)
        .integers(0, 256, kind.num_bytes(shape), dtype=np.uint8)
        .reshape(-1, kind.block_bytes)
    )
    halves = HALVES.get(kind.name, [0, 2])
    for start in halves:
        raw[:, start + 1] &= 0xBF
    return raw.reshape(-1)


@pytest.mark.parametrize("number", QUANTISED, ids=lambda n: BLOCK_TYPES[n].name)
@pytest.mark.parametrize("shape", [(1, 256), (5, 768), (2, 3, 512)], ids=str)
def test_random_blocks_bitwise(number: int, shape: tuple[int, ...]) -> None:
    raw = random_blocks(number, shape)
    packed = BLOCK_TYPES[number].tensor(raw, shape)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number)).reshape(shape)
    assert packed.shape == shape
    assert packed.dequantize().tobytes() == expected.tobytes()


@pytest.mark.parametrize("number", QUANTISED, ids=lambda n: BLOCK_TYPES[n].name)
def test_rows_and_code_range(number: int) -> None:
    packed = BLOCK_TYPES[number].tensor(random_blocks(number, (6, 256)), (6, 256))
    order = np.array([4, 0, 5])
    assert packed.rows(order).dequantize().tobytes() == packed.dequantize()[order].tobytes()
    packed = packed.packed()
    codes = packed.unpacked_codes().astype(int)
    low = -(1 << packed.bits - 1) if packed.code == "int" else 0
    assert codes.min() >= low and codes.max() < low + (1 << packed.bits)


@pytest.mark.parametrize("number", QUANTISED, ids=lambda n: BLOCK_TYPES[n].name)
def test_inputs_are_cut_between_blocks(number: int) -> None:
    codes = BLOCK_TYPES[number].codes
    size = BLOCK_TYPES[number].block_size
    if codes is not None and codes.levels != "small":
        size = codes.group
    packed = BLOCK_TYPES[number].tensor(random_blocks(number, (2, 3, 1024)), (2, 3, 1024))
    for first, last in ((0, 512), (512, 1024), (size, 1024), (256, 256 + size)):
        part = packed.inputs(first, last)
        assert part.shape == (2, 3, last - first)
        assert part.dequantize().tobytes() == packed.dequantize()[..., first:last].tobytes()
    with pytest.raises(
        ValueError,
        match=f"inputs {size // 2} to {size} cannot be cut from a weight of groups of {size}",
    ):
        packed.inputs(size // 2, size)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_are_views(name: str) -> None:
    number = next(n for n, kind in BLOCK_TYPES.items() if kind.name == name)
    values = np.random.default_rng(1).standard_normal((3, 8)).astype(BLOCK_TYPES[number].dtype)
    raw = values.reshape(-1).view(np.uint8)
    packed = BLOCK_TYPES[number].tensor(raw, (3, 8))
    assert np.shares_memory(packed.codes, raw)
    expected = gguf.quants.dequantize(
        raw.view(values.dtype) if name != "BF16" else raw, gguf.GGMLQuantizationType(number)
    )
    assert packed.dequantize().tobytes() == expected.astype(np.float32).tobytes()


def test_numbers_and_sizes_are_ggmls() -> None:
    for number, kind in BLOCK_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (
            kind.block_size,
            kind.block_bytes,
        )
