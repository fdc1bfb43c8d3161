"""How fast a directory's disk gives blocks of a file, past the system's cache of files.

Owns the scratch file that is read, which is removed again; the reading itself is
csrc/runtime/disk_rate.cpp.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from octavo.executor.native.extension import native_module
from octavo.executor.native.offload import BLOCK_BYTES, DEPTH
from octavo.executor.native.weight_file import check_directory, refused

SCRATCH_BYTES = 256 << 20
"""Bytes of the file that is read; random places in it are far enough apart for any disk."""

SECONDS = 0.4
"""Length of each measurement."""

RANDOM_BLOCKS = (4 << 10, 16 << 10, 64 << 10, 512 << 10)
"""Bytes of the blocks that are read at random places."""


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes a second that a disk gives, with as many reads in flight as the engine has."""

    in_order: float
    """Rate in blocks of the engine's size, one after another."""
    random: dict[int, float]
    """Rates at random places, by the bytes of a block."""


def measure_disk(
    directory: Path, *, scratch_bytes: int = SCRATCH_BYTES, seconds: float = SECONDS
) -> DiskRates | None:
    """Measures the disk of a directory with a scratch file; None where the file system has no reads
    that pass by its cache. Raises ConfigError where the directory cannot hold the file.
    """
    path = directory / ".octavo-disk-rate"
    check_directory(directory, path, scratch_bytes)
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".octavo-disk-") as file:
            for _ in range(scratch_bytes >> 20):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            return measure_file(Path(file.name), seconds=seconds)
    except OSError as error:
        raise refused(directory, error) from None


def measure_file(path: Path, *, seconds: float = SECONDS) -> DiskRates | None:
    """Measures the disk with a file that is there, of 512 KiB or more; None where its file system
    has no reads that pass by the cache.
    """

    def rate(block_bytes: int, *, in_order: bool) -> float:
        found: float = native_module().disk_rate(
            str(path), block_bytes, num_threads=DEPTH, in_order=in_order, seconds=seconds
        )
        return found

    in_order = rate(BLOCK_BYTES, in_order=True)
    if not in_order:
        return None
    return DiskRates(in_order, {size: rate(size, in_order=False) for size in RANDOM_BLOCKS})
