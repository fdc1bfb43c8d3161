"""Writes a stored file: to a temporary folder first, moved when it is complete.

The caller adds the file's record after `commit`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import TracebackType

from octavo.server.state.store import files_folder, get_file_path, incoming_folder
from octavo.utils.durable import sync_path


class FileWriter:
    """An open file; the context manager removes it unless it was committed."""

    def __init__(self, folder: Path, file_id: str) -> None:
        self.file_id = file_id
        self.num_bytes = 0
        self._folder = folder
        self._path = incoming_folder(folder) / file_id
        self._file = open(self._path, "xb")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    async def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        await asyncio.to_thread(self._file.write, data)

    async def commit(self) -> None:
        """Syncs the file to disk and moves it to its place."""
        await asyncio.to_thread(self._commit)

    def _commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        os.rename(self._path, get_file_path(self._folder, self.file_id))
        sync_path(files_folder(self._folder))
