"""Random weights in a model's shapes and formats, for benchmarks with only a config.json
(`load_format` "dummy").

The values depend only on the weight's name and shape, so they are equal on every backend and in
every process. Source: vLLM's `--load-format dummy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.checkpoint.ports import ModelHeader, StoredTensor, TokenizerSource
from octavo.program.program import Weight
from octavo.quant.online import E4M3_TOP, GROUP
from octavo.quant.packed import Code, Levels, PackedWeight

PERIOD = (1 << 22) + 15
"""Period of the random numbers; odd, so that the rows of a matrix differ."""

FLOATS: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CODES_OF_8: dict[str, tuple[Code, np.dtype, float]] = {
    "I8": ("int", np.dtype(np.int8), 127.0),
    "F8_E4M3": ("e4m3", np.dtype(ml_dtypes.float8_e4m3fn), E4M3_TOP),
}
FORMATS = (*FLOATS, *CODES_OF_8, "Q4_1")


class DummyCheckpoint:
    """A checkpoint without tensors. Implements `ports.Checkpoint`."""

    output_major = True
    weight_files: Sequence[Path] = ()

    def __init__(self, header: ModelHeader) -> None:
        self.path = header.path
        self.config: dict[str, Any] = header.config
        self.has_config_file = header.has_config_file
        self.generation_config: dict[str, Any] = header.generation_config
        self.get_format = header.get_format

    def names(self) -> Collection[str]:
        return ()

    def tokenizer_source(self) -> TokenizerSource | None:
        """Returns the tokenizer next to the config; None if there is none."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return tokenizer_source(folder, self.config, self.generation_config)

    def stored(self, name: str) -> StoredTensor:
        raise UnsupportedModel(
            f"{self.path}: load_format dummy reads no stored tensors, got {name}",
            hint="use load_format auto to read the stored weights",
        )

    def tensor(self, name: str) -> PackedWeight:
        raise UnsupportedModel(
            f"{self.path}: load_format dummy reads no stored tensors, got {name}",
            hint="use load_format auto to read the stored weights",
        )

    def release(self) -> None: ...


class DummyWeights:
    """Random weights for `Backend.prepare_program`, which calls `load`.

    `get_format` returns the stored format of a weight, by GGUF's names.
    """

    def __init__(self, format_of: Callable[[Weight], str]) -> None:
        self._format_of = format_of

    def load(self, weight: Weight) -> PackedWeight:
        """Returns a random weight.

        Matrices are uniform in +-sqrt(3 / inputs), which preserves the scale of activations;
        vectors are near 1.
        """
        stored = self._format_of(weight)
        first = crc32(weight.name.encode()) % PERIOD
        if len(weight.shape) < 2:
            return PackedWeight.plain(
                (1 + _random_numbers(first, weight.shape, np.dtype(np.float32)) / 8).astype(
                    FLOATS.get(stored, np.float32)
                )
            )
        reach = math.sqrt(3 / weight.shape[-1])
        if stored in FLOATS:
            return PackedWeight.plain(_random_numbers(first, weight.shape, FLOATS[stored], reach))
        if stored in CODES_OF_8:
            return _eight_bits(first, weight.shape, reach, stored)
        if stored == "Q4_1":
            return _four_bits(first, weight.shape, reach)
        what = (
            f"load_format: dummy supports weights stored as {', '.join(FORMATS)}; {weight.name} is"
            f" {stored}"
        )
        raise UnsupportedModel(
            what,
            hint=(
                "use a config.json without quantization, and set quantization to int4, int8 or fp8"
                " to pack the weights"
            ),
        )


def _eight_bits(first: int, shape: tuple[int, ...], reach: float, stored: str) -> PackedWeight:
    """Packs to 8 bits like `quant.online`, with one scale per output."""
    code, dtype, top = CODES_OF_8[stored]
    scales = np.full((*shape[:-1], 1), reach / top, np.float32)
    return PackedWeight(
        shape,
        8,
        code,
        _random_numbers(first, shape, dtype, top),
        shape[-1],
        Levels(scales),
        activation="per_token",
    )


def _four_bits(first: int, shape: tuple[int, ...], reach: float) -> PackedWeight:
    """Packs to 4 bits like `quant.online`, with fp16 scales and mins per group of 32."""
    *lead, width = shape
    levels = (*lead, width // GROUP)
    scales, mins = (
        Levels(np.full(levels, value, np.float16)) for value in (2 * reach / 15, -reach)
    )
    codes = _random_numbers(first, (*lead, width // 2), np.dtype(np.uint8))
    return PackedWeight(
        shape=shape,
        bits=4,
        code="uint",
        codes=codes,
        group=GROUP,
        scales=scales,
        mins=mins,
        nibbles="halves",
        activation="per_group",
    )


def _random_numbers(
    first: int, shape: tuple[int, ...], dtype: np.dtype, reach: float = 1.0
) -> NDArray:
    """Returns numbers in +-reach, or random bytes for uint8, from index `first` of the period."""
    period, count = _period(dtype, reach), math.prod(shape)
    repeated: NDArray = np.tile(period, -(-(first + count) // PERIOD))
    return repeated[first : first + count].reshape(shape)


@cache
def _period(dtype: np.dtype, reach: float) -> NDArray:
    generator = np.random.default_rng(0)
    if dtype == np.uint8:
        return generator.integers(0, 256, PERIOD, np.uint8)
    numbers = generator.uniform(-reach, reach, PERIOD).astype(np.float32)
    return numbers.astype(dtype)
