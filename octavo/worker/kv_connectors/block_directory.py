"""A directory of KV block files, named by block hash, shared by any number of engines, with LRU
eviction.

ROOT/<fingerprint>/<first byte of the digest>/<digest>-<group>.kv ROOT/tmp/ for files being written

A file's modification time is the time of its last use; a time in the future means that it is pinned
until then. Engines share no other state, so nothing must be repaired after a crash: each engine
lists the directory, and a file that another engine has removed is a miss.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octavo.api.errors import ConfigError
from octavo.config.paths import expand_path
from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    BlockPin,
    SlotBlock,
    StoredBytes,
)
from octavo.worker.kv_connectors.block_file import (
    DamagedFile,
    make_header,
    read_block_file,
    write_block_file,
)

logger = logging.getLogger(__name__)

SUFFIX = ".kv"
TOUCH_S = 60.0
"""Minimum seconds between two updates of a file's modification time."""
ABANDONED_S = 60.0
"""Age in seconds after which an unfinished file counts as left behind by a crashed engine."""
ROOM = 0.1
"""Fraction of the size that is freed at a time, so that the directory is not listed for every
block.
"""


class DirectoryFull(Exception):
    """Pinned files use all of the space."""


@dataclass(slots=True)
class StoredFile:
    """One block's file."""

    num_bytes: int
    used_at: float
    """Time of its last use, or end of its pin, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class DirectoryChanges:
    """Changes of the blocks with this fingerprint since the last listing."""

    found: list[BlockHashWithGroupId] = field(default_factory=list)
    gone: list[BlockHashWithGroupId] = field(default_factory=list)
    pinned: list[BlockPin] = field(default_factory=list)
    """All pins of blocks with this fingerprint."""


class BlockDirectory:
    """Stores blocks in files. Used by two threads: one reads, the other does everything else.
    `clock` returns seconds since 1970.
    """

    def __init__(
        self,
        root: Path,
        fingerprint: bytes,
        *,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.max_bytes = max_bytes
        self._root = root
        self._fingerprint = fingerprint
        self._folder = root / fingerprint.hex()[:32]
        self._temporary = root / "tmp"
        self._clock = clock
        self._counter = itertools.count()
        self._files: dict[Path, StoredFile] = {}
        self._num_bytes = 0
        self._pinned_bytes = self._foreign_pinned_bytes = 0
        self._pins: dict[BlockHashWithGroupId, float] = {}
        """Pins of blocks that are not stored yet."""
        self._num_damaged = 0
        self._num_write_errors = 0
        self._make_folders()

    def _make_folders(self) -> None:
        # If this fails because the disk is full, the next write reports it.
        with contextlib.suppress(OSError):
            for folder in (self._root, self._folder, self._temporary):
                folder.mkdir(mode=0o700, exist_ok=True)

    def look(self) -> DirectoryChanges:
        """Lists the directory, removes unfinished files of crashed engines, and evicts files if it
        is too large. Recreates a missing directory.
        """
        before = self._names()
        self._make_folders()
        self._list_again()
        self._remove_abandoned()
        self._make_room(0)
        now = self._names()
        pins = [
            BlockPin(name, entry.used_at)
            for path, entry in self._pinned()
            if (name := self._parse_name(path)) is not None
        ]
        return DirectoryChanges(sorted(now - before), sorted(before - now), pins)

    def stored(self) -> StoredBytes:
        """Returns the totals as of the last listing plus this engine's changes."""
        pinned = (self._pinned_bytes, self._foreign_pinned_bytes)
        return StoredBytes(self._num_bytes, *pinned, self._num_damaged, self._num_write_errors)

    # -- single blocks -----------------------------------------------------------------------------

    def write(self, block: SlotBlock, data: memoryview) -> list[BlockHashWithGroupId]:
        """Writes a block's file; returns the evicted blocks. Raises OSError or DirectoryFull if it
        cannot be stored; no partial file remains.

        A file that another engine has written and pinned stays pinned.
        """
        path = self.get_path(block.name)
        until = max(self._pins.get(block.name, 0.0), _get_time(path))
        header = make_header(self._fingerprint, block.group, block.key, len(data))
        gone = self._make_room(len(header) + len(data))
        try:
            num_bytes = write_block_file(
                path,
                self._temporary / f"{os.getpid()}-{id(self):x}-{next(self._counter)}",
                header,
                data,
            )
        except OSError:
            self._num_write_errors += 1
            raise
        self._drop(path)
        self._files[path] = StoredFile(num_bytes, self._clock())
        self._num_bytes += num_bytes
        self._pins.pop(block.name, None)
        if until > self._clock() and self._set_time(path, until):
            self._pinned_bytes += num_bytes
        return gone

    def read(self, block: SlotBlock, into: memoryview) -> bool:
        """Reads a block's bytes. Returns False if its file does not exist or is damaged; a damaged
        file is logged and removed.
        """
        path = self.get_path(block.name)
        try:
            read_block_file(
                path, make_header(self._fingerprint, block.group, block.key, len(into)), into
            )
        except FileNotFoundError:
            return False
        except DamagedFile as error:
            logger.warning("%s is removed from the prefix cache: %s", path, error)
            self._num_damaged += 1
            _unlink(path)
            return False
        except OSError as error:
            logger.warning("%s cannot be read and is recomputed: %s", path, error)
            return False
        return True

    def touch(self, name: BlockHashWithGroupId) -> None:
        """Marks a block as used now."""
        path, now = self.get_path(name), self._clock()
        entry = self._files.get(path)
        if entry is not None and entry.used_at < now - TOUCH_S:
            self._set_time(path, now)

    def pin(self, pins: Iterable[BlockPin]) -> None:
        """Pins blocks; a time in the past unpins them. A block that is not stored yet is pinned
        once it is stored.
        """
        for name, until in pins:
            path = self.get_path(name)
            if path not in self._files or not self._set_time(path, max(until, self._clock())):
                self._pins[name] = until
        self._count_pinned()

    def remove(self, name: BlockHashWithGroupId) -> None:
        """Removes a block's file and its pin."""
        path = self.get_path(name)
        self._pins.pop(name, None)
        self._drop(path)
        _unlink(path)

    def remove_all(self) -> None:
        """Removes all files of this fingerprint."""
        self._list_again()
        for path in [path for path in self._files if self._parse_name(path) is not None]:
            self._drop(path)
            _unlink(path)
        self._pins.clear()
        self._count_pinned()

    def get_path(self, name: BlockHashWithGroupId) -> Path:
        digest = name.digest.hex()
        return self._folder / digest[:2] / f"{digest}-{name.group}{SUFFIX}"

    # -- files -------------------------------------------------------------------------------------

    def _list(self) -> Iterator[tuple[Path, StoredFile]]:
        for folder in _folders(self._root):
            if folder == self._temporary:
                continue
            for part in _folders(folder):
                for entry in _entries(part):
                    if entry.name.endswith(SUFFIX) and (status := _status(entry)) is not None:
                        yield Path(entry.path), StoredFile(status.st_size, status.st_mtime)

    def _list_again(self) -> None:
        self._files = dict(self._list())
        self._num_bytes = sum(entry.num_bytes for entry in self._files.values())
        self._count_pinned()

    def _count_pinned(self) -> None:
        pinned = self._pinned()
        self._pinned_bytes = sum(entry.num_bytes for _, entry in pinned)
        self._foreign_pinned_bytes = sum(
            entry.num_bytes for path, entry in pinned if self._parse_name(path) is None
        )

    def _pinned(self) -> list[tuple[Path, StoredFile]]:
        now = self._clock()
        return [(path, entry) for path, entry in self._files.items() if entry.used_at > now]

    def _names(self) -> set[BlockHashWithGroupId]:
        return {name for path in self._files if (name := self._parse_name(path)) is not None}

    def _drop(self, path: Path) -> None:
        entry = self._files.pop(path, None)
        self._num_bytes -= 0 if entry is None else entry.num_bytes

    def _remove_abandoned(self) -> None:
        for entry in _entries(self._temporary):
            status = _status(entry)
            if status is not None and status.st_mtime < self._clock() - ABANDONED_S:
                logger.warning("removing %s, left incomplete by an engine that exited", entry.path)
                _unlink(Path(entry.path))

    def _make_room(self, num_bytes: int) -> list[BlockHashWithGroupId]:
        """Evicts files until `num_bytes` plus a reserve fit; returns the evicted blocks. Raises
        DirectoryFull if they cannot fit.
        """
        if self._num_bytes + num_bytes <= self.max_bytes:
            return []
        before = self._names()
        if num_bytes:
            self._list_again()  # other engines also use and remove blocks
        now = self._clock()
        bytes_left = self.max_bytes * (1 - ROOM) - num_bytes
        for path, entry in sorted(self._files.items(), key=lambda item: item[1].used_at):
            if self._num_bytes <= bytes_left or entry.used_at > now:
                break
            _unlink(path)
            self._drop(path)
        if num_bytes and self._num_bytes + num_bytes > self.max_bytes:
            raise DirectoryFull
        return sorted(before - self._names())

    def _set_time(self, path: Path, when: float) -> bool:
        """Sets a file's time; returns False if the file does not exist."""
        try:
            os.utime(path, (when, when))
        except OSError:
            self._drop(path)
            return False
        self._files[path].used_at = when
        return True

    def _parse_name(self, path: Path) -> BlockHashWithGroupId | None:
        """Parses a file name. Returns None for files with other fingerprints and other files."""
        if path.parent.parent != self._folder:
            return None
        digest, _, group = path.stem.partition("-")
        try:
            return BlockHashWithGroupId(int(group), bytes.fromhex(digest))
        except ValueError:
            return None


def open_root(text: str) -> Path:
    """Returns the directory that an option names, created if necessary. Raises ConfigError if it is
    not writable.
    """
    root = expand_path(text).absolute()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix="probe-", dir=root):
            pass
    except OSError as error:
        raise ConfigError(
            f"prefix_cache_dir: cannot write to {root}: {error.strerror}",
            hint="choose a directory that this user can write to",
        ) from error
    return root


def check_size(max_bytes: int, block_bytes: Sequence[int]) -> None:
    """Raises ConfigError if not even one block of each cache group fits."""
    if max_bytes < sum(block_bytes):
        raise ConfigError(
            f"prefix_cache_size: got {max_bytes}, expected at least one block of each cache"
            f" group, {sum(block_bytes)} bytes",
            hint="raise prefix_cache_size",
        )


def _folders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Reads a file's status. Returns None if another engine has removed it since it was listed."""
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None


def _get_time(path: Path) -> float:
    """Returns a file's modification time; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        logger.debug("%s is gone already", path)
