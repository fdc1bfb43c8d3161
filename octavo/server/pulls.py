"""Model downloads of a running server, each followed by any number of requests.

Requests for the same model share a download, which is cancelled after the last one disconnects. A
later request resumes it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

from octavo.api.errors import DownloadFailed, OctavoError
from octavo.checkpoint.catalogue import resolve
from octavo.utils.progress import FileProgress

REPORT_INTERVAL_S = 0.1
"""Minimum interval of progress reports, in seconds."""

logger = logging.getLogger(__name__)


class PullCancelled(DownloadFailed):
    """The last request that followed the download disconnected."""


class Pull:
    """The download of one model, in a thread."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.num_followers = 0
        self.files: dict[str, FileProgress] = {}
        """Latest progress of each file, in order of appearance."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        """Event that is set at the next change and then replaced by a new one."""
        self._cancelled = threading.Event()
        self._ended: asyncio.Future[Path] = self._loop.create_future()
        threading.Thread(target=self._run, name="octavo-pull", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return self._ended.done() or self._cancelled.is_set()

    async def follow(self) -> AsyncGenerator[list[FileProgress], None]:
        """Yields changed files until the download is complete; raises its error."""
        yielded: dict[str, FileProgress] = {}
        self.num_followers += 1
        try:
            while not self._ended.done() or yielded != self.files:
                changed = self._changed
                new = [
                    progress
                    for file, progress in self.files.items()
                    if yielded.get(file) != progress
                ]
                yielded = dict(self.files)
                if new:
                    yield new
                    await asyncio.sleep(REPORT_INTERVAL_S)
                elif not self._ended.done():
                    await changed.wait()
            self._ended.result()
        finally:
            self.num_followers -= 1
            if not self.num_followers and not self._ended.done():
                self._cancelled.set()

    async def path(self) -> Path:
        """Returns the model's path when the download is complete."""
        return await asyncio.shield(self._ended)

    def _run(self) -> None:
        try:
            self._post(resolve(self.model, watch=self._watch, takes_paths=False))
        except OctavoError as error:
            self._post(error)
        except BaseException as error:
            logger.exception("the download of %s failed", self.model)
            self._post(DownloadFailed(f"{self.model}: an internal error ({type(error).__name__})"))

    def _watch(self, progress: FileProgress) -> None:
        if self._cancelled.is_set():
            raise PullCancelled(f"{self.model}: cancelled: no client is waiting for the download")
        self._post(progress)

    def _post(self, event: FileProgress | Path | OctavoError) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._record, event)

    def _record(self, event: FileProgress | Path | OctavoError) -> None:
        match event:
            case FileProgress():
                self.files[event.file] = event
            case Path():
                self._ended.set_result(event)
            case _:
                self._ended.set_exception(event)
                self._ended.exception()  # marks it as retrieved; there may be no follower
        self._changed.set()
        self._changed = asyncio.Event()


class Pulls:
    """Running downloads, by model."""

    def __init__(self) -> None:
        self._running: dict[str, Pull] = {}

    def start(self, model: str) -> Pull:
        """Returns the download of a model; starts it unless it is running."""
        self._running = {name: pull for name, pull in self._running.items() if not pull.is_over}
        if model not in self._running:
            self._running[model] = Pull(model)
        return self._running[model]
