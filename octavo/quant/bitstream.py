"""Packs and unpacks integers of a few bits in 32-bit words, low bits first.

An integer may span two words if its width does not divide 32. GPTQ, AWQ and compressed-tensors
store codes and zeros like this.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORD_BITS = 32


def num_words(count: int, bits: int) -> int:
    """Returns the number of words that `count` integers of `bits` bits occupy."""
    return -(-count * bits // WORD_BITS)


def unpack_bits(words: NDArray, bits: int, count: int) -> NDArray[np.uint8]:
    """Returns the first `count` integers of each row: `[..., words]` to `[..., count]`."""
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    if WORD_BITS % bits == 0:
        shifts = np.arange(0, WORD_BITS, bits, dtype=np.uint32)
        fields = (unsigned[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.uint8)
        return fields.reshape(*words.shape[:-1], -1)[..., :count]
    first = np.arange(count) * bits
    index, shift = first // WORD_BITS, (first % WORD_BITS).astype(np.uint64)
    following = np.minimum(index + 1, unsigned.shape[-1] - 1)
    pairs = unsigned[..., index].astype(np.uint64)
    pairs |= unsigned[..., following].astype(np.uint64) << np.uint64(WORD_BITS)
    numbers: NDArray[np.uint8] = (pairs >> shift & np.uint64((1 << bits) - 1)).astype(np.uint8)
    return numbers


def pack_bits(numbers: NDArray, bits: int) -> NDArray[np.int32]:
    """Packs integers below 2 ** bits: `[..., count]` to `[..., words]`."""
    *lead, count = numbers.shape
    total = num_words(count, bits) * WORD_BITS
    spread = numbers[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8) & 1
    stream = np.zeros((*lead, total), np.uint8)
    stream[..., : count * bits] = spread.reshape(*lead, count * bits)
    return np.packbits(stream, axis=-1, bitorder="little").view(np.int32)
