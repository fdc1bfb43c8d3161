"""Measures the read rate of a directory's disk, bypassing the page cache.

Creates and removes a scratch file; csrc/runtime/disk_rate.cpp reads it.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from octavo.executor.native.extension import native_module
from octavo.executor.native.offload import BLOCK_BYTES, DEPTH
from octavo.executor.native.weight_file import check_directory, directory_error

SCRATCH_BYTES = 256 << 20
"""Size of the scratch file: large enough that random reads are far apart on any disk."""

SECONDS = 0.4
"""Duration of each measurement."""

RANDOM_BLOCKS = (4 << 10, 16 << 10, 64 << 10, 512 << 10)
"""Block sizes of random reads, in bytes."""


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Read rates in bytes per second, at the engine's number of reads in flight."""

    in_order: float
    """Sequential rate at the engine's block size."""
    random: dict[int, float]
    """Random read rates by block size in bytes."""


def measure_disk(
    directory: Path, *, scratch_bytes: int = SCRATCH_BYTES, seconds: float = SECONDS
) -> DiskRates | None:
    """Measures a directory's disk with a scratch file.

    Returns None if the file system does not support direct I/O; raises ConfigError if the directory
    cannot hold the file.
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
        raise directory_error(directory, error) from None


def measure_file(path: Path, *, seconds: float = SECONDS) -> DiskRates | None:
    """Measures a disk with an existing file of at least 512 KiB; None without direct I/O
    support.
    """

    def rate(block_bytes: int, *, in_order: bool) -> float:
        bytes_per_s: float = native_module().disk_rate(
            str(path), block_bytes, num_threads=DEPTH, in_order=in_order, seconds=seconds
        )
        return bytes_per_s

    in_order = rate(BLOCK_BYTES, in_order=True)
    if not in_order:
        return None
    return DiskRates(in_order, {size: rate(size, in_order=False) for size in RANDOM_BLOCKS})
