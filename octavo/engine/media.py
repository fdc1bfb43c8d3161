"""Encoder cache of one engine: which media the worker keeps as encoder output rows, and which ones
a step encodes.

Identifies media by a digest of their pixels; the worker owns the rows. Rows depend only on the
pixels, so evicted rows can be recomputed. The least recently used media are evicted first, but
never media that the current step reads.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.protocol.step import MediaContent, MediaItem


class EncoderCacheManager:
    """Media whose rows the worker has: up to `capacity_tokens` rows, plus the rows that one step
    reads.
    """

    def __init__(self, capacity_tokens: int = 0) -> None:
        self._capacity_tokens = capacity_tokens
        self.kept: dict[bytes, int] = {}
        """Number of rows by digest, least recently used first."""
        self._used: set[bytes] = set()
        """Media that the current step reads."""
        self._encodes: list[MediaContent] = []
        self.num_encoded = 0
        """Number of media sent to be encoded since the start."""

    def use(self, source: EngineRequest, start: int, end: int) -> None:
        """Records that a step computes the tokens from `start` up to `end` of a request."""
        for item in source.media:
            if item.is_encoded and item.start < end and start < item.end:
                self._use(item, source.pixels)

    def _use(self, item: MediaItem, pixels: Iterable[MediaContent]) -> None:
        self._used.add(item.digest)
        if self.kept.pop(item.digest, None) is None:
            self._encodes.append(next(each for each in pixels if each.digest == item.digest))
            self.num_encoded += 1
        self.kept[item.digest] = item.num_tokens

    def pop_encodes(self) -> list[MediaContent]:
        """Removes and returns the media that the next plan encodes."""
        encodes, self._encodes = self._encodes, []
        return encodes

    def pop_dropped(self) -> list[bytes]:
        """Removes and returns the media whose rows exceed the capacity. Ends the step."""
        excess = sum(self.kept.values()) - self._capacity_tokens
        dropped: list[bytes] = []
        for digest, num_tokens in self.kept.items():
            if excess <= 0:
                break
            if digest not in self._used:
                dropped.append(digest)
                excess -= num_tokens
        self.discard(dropped)
        self._used.clear()
        return dropped

    def discard(self, digests: Iterable[bytes]) -> None:
        """Removes media whose rows may be missing on the worker, so that they are encoded again
        when needed.
        """
        for digest in digests:
            self.kept.pop(digest, None)

    @property
    def digests(self) -> list[bytes]:
        """Digests of the cached media, least recently used first."""
        return list(self.kept)
