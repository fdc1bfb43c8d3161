"""Named sessions: prefixes whose blocks are pinned in `prefix_cache_dir`, and the files that name
them.

A session's file states the tokens, the other inputs of the block hashes, and everything that the
blocks' bytes depend on. The blocks themselves are those of the prefix cache, so sessions with a
common beginning share them. Blocking; not for the thread of an event loop.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from octavo.api.errors import InvalidRequest, ServerError, SessionNotFound, shown
from octavo.config.paths import expand_path
from octavo.engine.clients.client import as_number
from octavo.engine.protocol.requests import FETCHING, CountStored, FetchPrefix, PrefixRef
from octavo.engine.protocol.step import AdapterRef
from octavo.frontend.frontend import Frontend

FOLDER = "sessions"
"""Name of the folder in `prefix_cache_dir`."""
SUFFIX = ".json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NAME_FORM = "1 to 128 letters, digits, '.', '_' or '-', the first one a letter or a digit"
POLL_S = 0.005
"""Seconds between two queries to an engine that reads or writes blocks."""
WRITE_S = 120.0
"""Maximum seconds to wait until a session's blocks are written."""


class SavedSession(msgspec.Struct):
    """A session's file."""

    name: str
    model: str
    created_at: int
    """Unix time in seconds."""
    num_tokens: int
    """Tokens in full blocks, which are stored."""
    num_bytes: int
    """Bytes of the blocks that a request needs to continue."""
    facts: dict[str, str]
    """Everything that the bytes of the blocks depend on, by name."""
    prefix: PrefixRef
    adapter: str = ""
    """Name of the adapter; "" for the base model."""
    messages: list[dict[str, Any]] | None = None
    """Conversation as the client sent it; None if it sent none."""


@dataclass(frozen=True, slots=True)
class RestoredSession:
    session: SavedSession
    num_loaded: int
    """Tokens whose blocks are in memory; the remaining ones are read when a request needs them."""


class Sessions:
    """The sessions of one engine."""

    def __init__(self, frontend: Frontend, wait: Callable[[], None]) -> None:
        """`wait` lets the engine work for a moment."""
        self._frontend = frontend
        self._wait = wait

    def check(self, name: str) -> None:
        """Raises InvalidRequest if the engine stores no sessions, or for an invalid name."""
        self._check_stores()
        if NAME.fullmatch(name) is None:
            raise InvalidRequest(f"name: got {shown(name)}, expected {NAME_FORM}", param="name")

    def save(
        self,
        name: str,
        prefix: PrefixRef,
        *,
        adapter: AdapterRef | None = None,
        messages: list[dict[str, Any]] | None = None,
    ) -> SavedSession:
        """Writes the full blocks of a computed prefix, then the session's file. Replaces a session
        of the same name. Raises InvalidRequest if pinned blocks exceed their limit, ServerError if
        the blocks cannot be written.
        """
        self.check(name)
        earlier = self._read(self._path(name))
        num_tokens = self._frontend.pin(prefix, None)
        deadline = time.monotonic() + WRITE_S
        while self._count(CountStored(prefix)) < num_tokens:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"session {name!r}: its blocks were not written within {WRITE_S:.0f} s",
                    hint="check the free space of prefix_cache_dir",
                )
            self._wait()
        session = SavedSession(
            name=name,
            model=self._frontend.config.model.served_model_name or "",
            created_at=int(time.time()),
            num_tokens=num_tokens,
            num_bytes=self._count(CountStored(prefix, in_bytes=True)),
            facts=self._frontend.info.cache_facts,
            prefix=prefix,
            adapter="" if adapter is None else adapter.name,
            messages=messages,
        )
        self._write(session)
        if earlier is not None:
            self._unpin(earlier)
        return session

    def restore(self, name: str, adapter: AdapterRef | None = None) -> RestoredSession:
        """Reads a session's blocks into memory, so that a request with the same beginning does not
        compute it again. Raises SessionNotFound, or InvalidRequest if the session belongs to other
        weights, options or another adapter, or if blocks are missing.
        """
        session = self.find(name)
        self._check_facts(session)
        digest = b"" if adapter is None else adapter.digest
        if session.prefix.adapter_digest != digest:
            saved, got = session.adapter or "none", "none" if adapter is None else adapter.name
            changed = " of other weights" if saved == got else ""
            raise InvalidRequest(
                f"session {name!r}: got adapter {got}, expected adapter {saved}{changed}",
                hint="set model to the adapter with which the session was saved",
                param="model",
            )
        while (num_loaded := self._count(FetchPrefix(session.prefix))) == FETCHING:
            self._wait()
        num_stored = max(num_loaded, self._count(CountStored(session.prefix)))
        if num_stored < session.num_tokens:
            raise InvalidRequest(
                f"session {name!r}: {num_stored:,} of its {session.num_tokens:,} tokens are stored;"
                " the other blocks are missing or damaged",
                hint="save the session again",
            )
        return RestoredSession(session, num_loaded)

    def list(self) -> list[SavedSession]:
        """Returns all sessions in the directory, by name."""
        self._check_stores()
        paths = sorted(self._folder.glob(f"*{SUFFIX}")) if self._folder.is_dir() else []
        return [session for path in paths if (session := self._read(path)) is not None]

    def find(self, name: str) -> SavedSession:
        """Returns a session by name; raises SessionNotFound."""
        self.check(name)
        session = self._read(self._path(name))
        if session is None:
            raise SessionNotFound(
                f"no session {name!r} in {FOLDER} of prefix_cache_dir",
                hint="GET /v1/sessions lists the sessions",
            )
        return session

    def delete(self, name: str) -> None:
        """Deletes a session's file, and unpins the blocks that no other session has. Raises
        SessionNotFound, or InvalidRequest if it belongs to another model.
        """
        session = self.find(name)
        self._check_facts(session)
        self._path(name).unlink(missing_ok=True)
        self._unpin(session)

    # -- private -----------------------------------------------------------------------------------

    def _check_stores(self) -> None:
        if self._frontend.config.cache.prefix_cache_dir is None:
            raise InvalidRequest(
                "sessions require prefix_cache_dir", hint="start it with prefix_cache_dir"
            )

    @property
    def _folder(self) -> Path:
        return expand_path(self._frontend.config.cache.prefix_cache_dir or "").absolute() / FOLDER

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"

    def _count(self, query: CountStored | FetchPrefix) -> int:
        return as_number(self._frontend.client.query(query))

    def _check_facts(self, session: SavedSession) -> None:
        own, saved = self._frontend.info.cache_facts, session.facts
        others = [name for name in {**own, **saved} if own.get(name) != saved.get(name)]
        if others:
            raise InvalidRequest(
                f"session {session.name!r}: got a session of model {session.model!r} with different"
                f" {', '.join(others)}, expected the ones of this engine",
                hint="serve the model with the options that saved the session, or save it again",
                param="name",
            )

    def _unpin(self, session: SavedSession) -> None:
        """Unpins a session's blocks, except those of other sessions."""
        if session.facts != self._frontend.info.cache_facts:
            return
        self._frontend.pin(session.prefix, 0)
        for other in self.list():
            if other.facts == session.facts and _may_share(other.prefix, session.prefix):
                self._frontend.pin(other.prefix, None)

    def _read(self, path: Path) -> SavedSession | None:
        """Reads a session's file; returns None if there is none. Raises InvalidRequest for another
        file.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=SavedSession)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidRequest(
                f"session {path.stem!r}: its file cannot be read: {error}",
                hint=f"remove {FOLDER}/{path.name} in prefix_cache_dir",
            ) from error

    def _write(self, session: SavedSession) -> None:
        path = self._path(session.name)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(number, "wb") as file:
                file.write(msgspec.json.encode(session))
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise ServerError(
                f"session {session.name!r}: its file cannot be written: {error.strerror}",
                hint="check the free space of prefix_cache_dir",
            ) from error


def _may_share(one: PrefixRef, other: PrefixRef) -> bool:
    """Returns whether two prefixes may have a block in common."""
    return one.token_ids[:1] == other.token_ids[:1] and one.salt == other.salt
