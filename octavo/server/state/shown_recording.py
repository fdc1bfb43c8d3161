"""A recording shown by the page: compressed frames, in chunks that begin with a snapshot.

A thread reads the recording while the first frames are served. The number of frames is limited.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Iterable

import msgspec

from octavo.api.errors import InvalidRequest, OctavoError
from octavo.engine.live.feed import Event

FRAMES_IN_CHUNK = 64

logger = logging.getLogger(__name__)


class ShownRecording:
    """Frames of one recording; more are added until `is_complete`."""

    def __init__(self, name: str, frames: Iterable[Event], *, max_frames: int) -> None:
        self.name = name
        self.is_complete = False
        self.problem: str | None = None
        """Reason for missing frames at the end; None if there are none."""
        self.num_frames = 0
        self._frames = frames
        self._max_frames = max_frames
        self._chunks: list[bytes] = []
        self._open: list[bytes] = []
        """Frames of the last chunk, which is not complete yet."""
        self._lock = threading.Lock()

    def start(self) -> threading.Thread:
        """Reads the frames in a thread."""
        thread = threading.Thread(target=self.read, name="octavo-recording", daemon=True)
        thread.start()
        return thread

    def read(self) -> None:
        """Reads all frames, up to the maximum."""
        try:
            for frame in self._frames:
                if self.num_frames == self._max_frames:
                    self.problem = (
                        f"Only the first {self._max_frames:,} steps are shown; raise --max-steps to"
                        " show more."
                    )
                    break
                self._add(msgspec.json.encode(frame))
        except OctavoError as error:
            self.problem = f"The recording cannot be shown further. {error.message}"
        except Exception:
            logger.exception("a recording could not be read completely")
            self.problem = (
                "The recording cannot be shown further: its lines do not fit in memory together."
            )
        self.is_complete = True

    def chunk(self, number: int) -> bytes:
        """Returns a chunk as JSON; the last one may still grow."""
        with self._lock:
            if 0 <= number < len(self._chunks):
                return zlib.decompress(self._chunks[number])
            if number == len(self._chunks) and self._open:
                return _join(self._open)
        last = max(0, self.num_frames - 1) // FRAMES_IN_CHUNK
        raise InvalidRequest(f"chunk: got {number}, expected 0 to {last}", param="chunk")

    def _add(self, frame: bytes) -> None:
        with self._lock:
            self._open.append(frame)
            self.num_frames += 1
            if len(self._open) == FRAMES_IN_CHUNK:
                self._chunks.append(zlib.compress(_join(self._open), 6))
                self._open = []


def _join(frames: list[bytes]) -> bytes:
    return b'{"frames":[' + b",".join(frames) + b"]}"
