"""Looks up tokens by bytes: which tokens start a text, and which extend it.

Special tokens have no text; in forced text, llguidance represents them by id.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence

SPECIAL = b"\xff["
"""Marker before a special token id in forced text; no text contains this byte."""
MOST_EXTENSIONS = 16
"""Maximum number of tokens that extend beyond a forced text and are tried; with more, several are
assumed to be legal.
"""


class VocabularyTexts:
    def __init__(self, tokens: Sequence[bytes], special_token_ids: Collection[int]) -> None:
        self._ids: dict[bytes, list[int]] = {}
        special = frozenset(special_token_ids)
        for token_id, text in enumerate(tokens):
            if text and token_id not in special:
                self._ids.setdefault(text, []).append(token_id)
        self._sorted = sorted(self._ids)
        self._longest = max(map(len, self._ids), default=0)

    def only_token(self, forced: bytes, allows: Callable[[int], bool]) -> int | None:
        """Returns the only token that can continue a text whose next bytes are forced; None if
        several can.

        `allows` checks tokens that extend beyond these bytes.
        """
        if forced.startswith(SPECIAL):
            return int(forced[len(SPECIAL) : forced.index(b"]")])
        forced = forced.partition(SPECIAL)[0]
        legal: list[int] = []
        for length in range(1, min(len(forced), self._longest) + 1):
            legal += self._ids.get(forced[:length], ())
            if len(legal) > 1:
                return None
        longer = self._longer(forced)
        if len(longer) > MOST_EXTENSIONS:
            return None
        legal += [i for text in longer for i in self._ids[text] if allows(i)]
        return legal[0] if len(legal) == 1 else None

    def byte_token(self, byte: int) -> int | None:
        """Returns the token of a single byte; None if there is none."""
        found = self._ids.get(bytes([byte]))
        return None if found is None else found[0]

    def fewest_tokens(self, text: bytes) -> list[int]:
        """Splits a text into the fewest tokens; a special token marker gives that token. Returns []
        if impossible.
        """
        if text.startswith(SPECIAL):
            return [int(text[len(SPECIAL) : -1])]
        # For each suffix of the text: its number of tokens, and the length of the first one.
        best: list[tuple[int, int] | None] = [None] * len(text) + [(0, 0)]
        for start in range(len(text) - 1, -1, -1):
            for length in range(1, min(len(text) - start, self._longest) + 1):
                rest = best[start + length]
                if rest is None or text[start : start + length] not in self._ids:
                    continue
                now = best[start]
                if now is None or rest[0] + 1 <= now[0]:
                    best[start] = (rest[0] + 1, length)
        tokens, start = [], 0
        while start < len(text) and (step := best[start]) is not None:
            tokens.append(self._ids[text[start : start + step[1]]][0])
            start += step[1]
        return tokens

    def _longer(self, text: bytes) -> list[bytes]:
        """Returns the token texts that extend a text."""
        first = bisect_right(self._sorted, text)
        return self._sorted[first : bisect_left(self._sorted, text + b"\xff")]
