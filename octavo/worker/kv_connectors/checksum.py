"""The checksum of KV blocks' bytes, wherever they lie outside of the engine that computed them.

XXH3 with 64 bits finds damage, not malice. It reads memory several times as fast as a network
brings it, which CRC-32 does not. Source: xxHash (Collet), by way of the package `xxhash`.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash
from numpy.typing import NDArray

CHECKSUM = struct.Struct("<Q")
"""A checksum as it is stored."""

Data = bytes | memoryview | NDArray[np.uint8]


def checksum_of(*parts: Data) -> int:
    """Returns the checksum of the parts' bytes, one part after the other."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part.data if isinstance(part, np.ndarray) else part)
    return state.intdigest()
