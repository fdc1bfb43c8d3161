"""File of packed tiles for weight streaming, written once per model and found by its name.

    header 4096 | units, each aligned to 4096 | index, JSON

A file is written under a temporary name, flushed and renamed, so that no process reads a partial
file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from octavo.api.errors import ConfigError
from octavo.config.sizes import format_bytes
from octavo.program.passes.offload import ALIGN
from octavo.utils.durable import sync_path

MAGIC = b"octavoW5"
"""Magic bytes of a file; the number changes with the tile layout."""
HEADER = struct.Struct("<8s32sQQ32s")
"""Magic, key, offset and length of the index, and its SHA-256."""

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""File systems that are themselves memory."""


@dataclass(frozen=True, slots=True)
class PlacedTiles:
    """Offset of one weight's tiles in its unit, and their layout for the extension."""

    offset: int
    layout: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """A matmul's weights in the file."""

    offset: int
    num_bytes: int
    tiles: tuple[PlacedTiles, ...]


class WeightFileWriter:
    """Writes the units of one file in order."""

    def __init__(self, file: IO[bytes], key: bytes) -> None:
        self._file = file
        self._key = key
        self._units: list[StoredUnit] = []
        self._file.write(bytes(ALIGN))

    def add(self, data: bytes, tiles: Sequence[PlacedTiles]) -> None:
        """Writes a unit; its length must be a multiple of ALIGN."""
        self._units.append(StoredUnit(self._file.tell(), len(data), tuple(tiles)))
        self._file.write(data)

    def finish(self) -> None:
        """Writes the index and then the header, which makes the file valid."""
        start = self._file.tell()
        index = json.dumps(
            [
                [
                    unit.offset,
                    unit.num_bytes,
                    [[placed.offset, placed.layout] for placed in unit.tiles],
                ]
                for unit in self._units
            ]
        ).encode()
        self._file.write(index)
        self._file.flush()
        os.fsync(self._file.fileno())
        header = HEADER.pack(MAGIC, self._key, start, len(index), hashlib.sha256(index).digest())
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())


def read_index(path: Path, key: bytes) -> list[StoredUnit] | None:
    """Returns the units of a complete file with this key, or None."""
    try:
        with path.open("rb") as file:
            header = file.read(HEADER.size)
            if len(header) < HEADER.size:
                return None
            magic, stored_key, start, length, digest = HEADER.unpack(header)
            size = os.fstat(file.fileno()).st_size
            if magic != MAGIC or stored_key != key or start + length != size:
                return None
            file.seek(start)
            index = file.read(length)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise directory_error(path.parent, error) from None
    if hashlib.sha256(index).digest() != digest:
        return None
    return [
        StoredUnit(
            offset,
            size,
            tuple(PlacedTiles(tile_offset, tuple(layout)) for tile_offset, layout in tiles),
        )
        for offset, size, tiles in json.loads(index)
    ]


@contextmanager
def writing(path: Path, key: bytes) -> Iterator[WeightFileWriter | None]:
    """Writes a file under a temporary name and renames it at the end; removes it on failure.

    Yields None if another process has just written it.
    """
    partial = _partial(path)
    try:
        with _open_alone(partial) as file:
            try:
                if read_index(path, key) is None:
                    file.truncate()
                    yield WeightFileWriter(file, key)
                    partial.replace(path)
                    sync_path(path.parent)
                else:
                    partial.unlink()
                    yield None
            except BaseException:
                # Before the lock is released: afterwards another process may write under this name.
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise directory_error(path.parent, error) from None


def _partial(path: Path) -> Path:
    return path.with_suffix(".partial")


def _open_alone(path: Path) -> IO[bytes]:
    """Opens or creates a file under an exclusive lock.

    Retries if the previous lock holder renamed or removed it.
    """
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def check_directory(
    directory: Path, path: Path, num_bytes: int, *, name: str = "weights_dir"
) -> None:
    """Creates the directory; raises ConfigError if it is in memory or lacks space for a missing
    file.

    Space of an abandoned partial file counts as free.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        kind = get_file_system(directory)
        free = shutil.disk_usage(directory).free + _get_disk_bytes(_partial(path))
    except OSError as error:
        raise directory_error(directory, error, name=name) from None
    if kind in IN_MEMORY:
        raise ConfigError(
            f"{name}: {directory} is on {kind}, which keeps files in memory",
            hint="use a directory on a disk",
        )
    if not path.exists() and free < num_bytes:
        raise ConfigError(
            f"{name}: {directory} has {format_bytes(free)} free, requires"
            f" {format_bytes(num_bytes)}",
            hint="free space, or use a directory on another disk",
        )


def _get_disk_bytes(path: Path) -> int:
    """Returns the disk space of a file; 0 if it does not exist."""
    return 512 * path.stat().st_blocks if path.exists() else 0


def get_file_system(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Returns the file system type of a directory; "" if unknown."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    resolved = directory.resolve()
    best = -1
    kind = ""
    for line in lines:
        _, where, name, *_ = line.split(" ")
        root = Path(where.replace("\\040", " "))
        if resolved.is_relative_to(root) and len(root.parts) >= best:
            best, kind = len(root.parts), name
    return kind


def directory_error(directory: Path, error: OSError, *, name: str = "weights_dir") -> ConfigError:
    """Returns the error of a directory that cannot be used."""
    hint = "use a directory that this process can write to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free space, or use a directory on another disk"
    return ConfigError(f"{name}: {directory} cannot be used: {error.strerror}", hint=hint)
