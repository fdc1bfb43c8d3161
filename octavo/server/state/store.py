"""Persistent records of responses, files and batches, in a SQLite database.

A change is atomic and durable when its method returns. Each record has an owner and an expiry time.
All access goes through one thread, so that the event loop never waits for the disk.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from starlette.exceptions import HTTPException

from octavo.api.errors import ConfigError, InvalidRequest, shown

logger = logging.getLogger(__name__)

Kind = Literal["response", "file", "batch"]
ResultT = TypeVar("ResultT")

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE records (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    owner TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    num_bytes INTEGER NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX records_by_owner ON records (kind, owner, number);
CREATE INDEX records_by_age ON records (expires_at);
CREATE TABLE lines (
    batch TEXT NOT NULL,
    line INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""
COLUMNS = "id, kind, owner, created_at, expires_at, num_bytes, body"
SWEEP_EVERY_S = 60
"""Interval between deletions of expired records, in seconds."""
KEPT_FOR_BATCHES = """
    SELECT json_extract(body, '$.batch.input_file_id') FROM records
    WHERE kind = 'batch' AND expires_at IS NULL
"""
"""Input files of unfinished batches, which do not expire."""


@dataclass(frozen=True, slots=True)
class Record:
    """A stored object; `body` belongs to its API."""

    id: str
    kind: Kind
    owner: str
    body: dict[str, Any]
    created_at: int = field(default_factory=lambda: int(time.time()))
    expires_at: int | None = None
    """Unix time of expiry; None while it is unfinished."""
    num_bytes: int = 0
    """Bytes stored in addition to the body, such as a file's content."""


@dataclass(frozen=True, slots=True)
class LineResult:
    """Result of one batch request."""

    line: int
    """Line number in the input file, starting at 1."""
    failed: bool
    body: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a listing, starting after the record `after`."""

    limit: int
    after: str | None = None
    newest_first: bool = True
    purpose: str | None = None
    """Purpose of the files to list; None: all."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    ttl_s: int
    """Seconds for which a finished record is kept."""
    max_bytes: int


class Store:
    """The records in one folder, which only one server may use at a time."""

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self.folder = folder
        self.limits = limits
        self._lock = _lock(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-store")
        self._num_bytes = 0
        self._swept_at = 0.0
        try:
            self._database: sqlite3.Connection = self._thread.submit(
                _open_database, folder
            ).result()
            self._thread.submit(self._recount).result()
        except BaseException:
            self._thread.shutdown()
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Closes the database and releases the folder."""
        self._thread.submit(self._database.close).result()
        self._thread.shutdown()
        os.close(self._lock)

    @property
    def expires_at(self) -> int:
        """Expiry of a record that is finished now, as Unix time."""
        return int(time.time()) + self.limits.ttl_s

    def check_room(self, num_bytes: int = 0) -> None:
        """Raises a 507 if there is no room for `num_bytes` more bytes."""
        if self._num_bytes + num_bytes > self.limits.max_bytes:
            raise HTTPException(
                507,
                f"the store is full: it holds {self._num_bytes} bytes of {self.limits.max_bytes}"
                f" allowed, and {num_bytes} more were requested (hint: delete unused objects, or"
                f" raise max_stored_bytes)",
            )

    # -- records -----------------------------------------------------------------------------------

    async def add(self, record: Record) -> None:
        await self.apply(add=[record])

    async def replace(self, record: Record) -> None:
        """Updates a record, unless it has been deleted."""
        await self.apply(replace=[record])

    async def apply(
        self,
        *,
        add: Sequence[Record] = (),
        replace: Sequence[Record] = (),
        drop_lines_of: str | None = None,
    ) -> None:
        """Applies several changes atomically."""
        await self._run(lambda: self._apply(add, replace, drop_lines_of))

    async def find(self, kind: Kind, record_id: str, owner: str) -> Record | None:
        """Returns an owner's record; None if there is none."""
        query = f"SELECT {COLUMNS} FROM records WHERE id = ? AND kind = ? AND owner = ?"
        matching = await self._run(lambda: self._select(query, (record_id, kind, owner)))
        return matching[0] if matching else None

    async def page(self, kind: Kind, owner: str, page: Page) -> tuple[list[Record], bool]:
        """Returns the records of a page, and whether there are more. Raises InvalidRequest if the
        record `after` is gone: with an empty page the client would end its listing.
        """
        if page.after is not None and await self.find(kind, page.after, owner) is None:
            raise InvalidRequest(f"after: no {kind} {shown(page.after)}", param="after")
        order, behind = ("DESC", "<") if page.newest_first else ("ASC", ">")
        query = f"SELECT {COLUMNS} FROM records WHERE kind = ? AND owner = ?"
        values: list[Any] = [kind, owner]
        if page.after is not None:
            query += f" AND number {behind} (SELECT number FROM records WHERE id = ?)"
            values.append(page.after)
        if page.purpose is not None:
            query += " AND json_extract(body, '$.purpose') = ?"
            values.append(page.purpose)
        query += f" ORDER BY number {order} LIMIT ?"
        values.append(page.limit + 1)
        matching = await self._run(lambda: self._select(query, values))
        return matching[: page.limit], len(matching) > page.limit

    async def unfinished(self, kind: Kind) -> list[Record]:
        """Returns all owners' unfinished records, oldest first."""
        query = f"SELECT {COLUMNS} FROM records WHERE kind = ? AND expires_at IS NULL"
        return await self._run(lambda: self._select(f"{query} ORDER BY number", (kind,)))

    async def delete(self, record: Record) -> bool:
        """Deletes a record; returns whether it existed."""
        return await self._run(lambda: self._delete([record.id])) == 1

    # -- lines of batches --------------------------------------------------------------------------

    async def add_line(self, batch_id: str, result: LineResult) -> None:
        """Stores the result of a batch request, unless it already has one."""

        def insert() -> None:
            with self._database as transaction:
                transaction.execute(
                    "INSERT OR IGNORE INTO lines VALUES (?, ?, ?, ?)",
                    (batch_id, result.line, result.failed, result.body),
                )

        await self._run(insert)

    async def lines_done(self, batch_id: str) -> dict[int, bool]:
        """Returns line number -> failed for all finished batch requests."""
        query = "SELECT line, failed FROM lines WHERE batch = ?"
        rows = await self._run(lambda: self._database.execute(query, (batch_id,)).fetchall())
        return {line: bool(failed) for line, failed in rows}

    async def line_results(self, batch_id: str, *, after: int, limit: int) -> list[LineResult]:
        """Returns at most `limit` results after line `after`, in line order."""
        query = "SELECT line, failed, body FROM lines WHERE batch = ? AND line > ?"
        values = (batch_id, after, limit)
        rows = await self._run(
            lambda: self._database.execute(f"{query} ORDER BY line LIMIT ?", values).fetchall()
        )
        return [LineResult(line, bool(failed), body) for line, failed, body in rows]

    # -- in the thread of the database -------------------------------------------------------------

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        """Runs work in the database's thread; disk errors become a 507."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError) as error:
            logger.exception("the store in %s has failed", self.folder)
            raise HTTPException(507, "the server's store is unavailable") from error

    def _apply(
        self, add: Iterable[Record], replace: Iterable[Record], drop_lines_of: str | None
    ) -> None:
        gained = 0
        with self._database as transaction:
            for row in map(_row, add):
                marks = ", ".join("?" * len(row))
                transaction.execute(f"INSERT INTO records ({COLUMNS}) VALUES ({marks})", row)
                gained += row[-2] + len(row[-1])
            for row in map(_row, replace):
                before = self._bytes_of(row[0])
                changed = transaction.execute(
                    "UPDATE records SET expires_at = ?, num_bytes = ?, body = ? WHERE id = ?",
                    (*row[-3:], row[0]),
                )
                if changed.rowcount:  # it may have been deleted
                    gained += row[-2] + len(row[-1]) - before
            if drop_lines_of is not None:
                transaction.execute("DELETE FROM lines WHERE batch = ?", (drop_lines_of,))
        self._num_bytes += gained
        self._sweep()

    def _bytes_of(self, record_id: str) -> int:
        query = "SELECT coalesce(sum(num_bytes + length(body)), 0) FROM records WHERE id = ?"
        (num_bytes,) = self._database.execute(query, (record_id,)).fetchone()
        return int(num_bytes)

    def _select(self, query: str, values: Sequence[Any]) -> list[Record]:
        self._sweep()
        now = time.time()
        records = [
            Record(
                id=row[0],
                kind=row[1],
                owner=row[2],
                created_at=row[3],
                expires_at=row[4],
                num_bytes=row[5],
                body=msgspec.json.decode(row[6]),
            )
            for row in self._database.execute(query, values)
        ]
        return [
            record for record in records if record.expires_at is None or record.expires_at > now
        ]

    def _delete(self, ids: Sequence[str]) -> int:
        """Deletes records, then their files."""
        with self._database as transaction:
            count = sum(
                transaction.execute("DELETE FROM records WHERE id = ?", (one,)).rowcount
                for one in ids
            )
            for one in ids:
                transaction.execute("DELETE FROM lines WHERE batch = ?", (one,))
        for one in ids:
            get_file_path(self.folder, one).unlink(missing_ok=True)
        self._count_bytes()
        return count

    def _sweep(self) -> None:
        """Deletes expired records, at most once per interval."""
        now = time.time()
        if now - self._swept_at < SWEEP_EVERY_S:
            return
        self._swept_at = now
        expired = self._database.execute(
            f"SELECT id FROM records WHERE expires_at <= ? AND id NOT IN ({KEPT_FOR_BATCHES})",
            (int(now),),
        )
        ids = [one for (one,) in expired]
        if ids:
            self._delete(ids)

    def _recount(self) -> None:
        """Removes files without a record, left by a killed process or a deletion."""
        for folder in (files_folder(self.folder), incoming_folder(self.folder)):
            folder.mkdir(exist_ok=True)
        for left_over in incoming_folder(self.folder).iterdir():
            left_over.unlink()
        named = {one for (one,) in self._database.execute("SELECT id FROM records")}
        for path in files_folder(self.folder).iterdir():
            if path.name not in named:
                path.unlink()
        self._count_bytes()

    def _count_bytes(self) -> None:
        (self._num_bytes,) = self._database.execute(
            "SELECT coalesce(sum(num_bytes + length(body)), 0) FROM records"
        ).fetchone()


def files_folder(folder: Path) -> Path:
    return folder / "files"


def incoming_folder(folder: Path) -> Path:
    """Returns the folder of incomplete files."""
    return folder / "incoming"


def get_file_path(folder: Path, file_id: str) -> Path:
    return files_folder(folder) / file_id


def open_store(folder: Path, limits: StoreLimits) -> Store:
    """Opens the store in a folder, creating it if necessary; raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Store(folder, limits)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"state_dir: cannot write to {folder}: {error}",
            hint="set another --state-dir, or disable storage with --state-dir ''",
        ) from error


def _lock(folder: Path) -> int:
    """Locks a folder and returns the descriptor; raises ConfigError if it is locked."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"state_dir: another server uses {folder}",
            hint="use a separate --state-dir for each server",
        ) from None
    return descriptor


def _open_database(folder: Path) -> sqlite3.Connection:
    """Opens the database in WAL mode with full synchronization, so that commits are durable."""
    database = sqlite3.connect(folder / "records.sqlite3")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"state_dir: {folder} was written by a newer version of Octavo",
            hint="set another --state-dir",
        )
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    if version == 0:
        database.executescript(f"BEGIN;{SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
    return database


def _row(record: Record) -> tuple[Any, ...]:
    return (
        record.id,
        record.kind,
        record.owner,
        record.created_at,
        record.expires_at,
        record.num_bytes,
        msgspec.json.encode(record.body).decode(),
    )
