"""Keeps special token text in user messages distinct from real special tokens when rendering a chat
template.

User strings are passed to the template with special token text replaced by unguessable numbers,
which survive trimming, case changes and JSON encoding. All special tokens in the rendered text are
then the template's own, and the numbers are replaced by the original texts. Strings without special
token text are unchanged, so templates can inspect them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from octavo.text.encoding import encode_with_offsets
from octavo.text.unicode import check_unicode


@dataclass(frozen=True, slots=True)
class Spelled:
    """Special token text at characters `start` to `stop`."""

    token_id: int
    start: int
    stop: int


class SpecialText:
    """Finds special tokens of one tokenizer, using a tokenizer that contains only these, so that
    matching is identical.
    """

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        texts = [token.content for token in tokens.values()]
        self._ids = list(tokens)
        self._contents = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        """Pattern of all special tokens: a quick check, 100x faster than the package."""
        self._finder = Tokenizer(models.BPE())
        self._finder.add_special_tokens(list(tokens.values()))
        self._beginnings = {text[:end] for text in texts for end in range(1, len(text))}
        self._endings = {text[start:] for text in texts for start in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def find(self, text: str) -> list[Spelled]:
        """Returns all special tokens in the text, in order."""
        check_unicode(text)
        if self._contents.search(text) is None:
            return []
        encoding = encode_with_offsets(self._finder, text)
        return [
            Spelled(self._ids[i], start, stop)
            for i, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def leading(self, text: str) -> int:
        """Returns the end of the special tokens at the start of the text."""
        end = 0
        for spelled in self.find(text):
            if spelled.start != end:
                break
            end = spelled.stop
        return end

    def guard(self) -> Guard:
        """Creates the guard for one rendering."""
        return Guard(self)

    def may_continue(self, text: str) -> bool:
        """Returns whether the end of the text could be the start of a special token."""
        return any(
            text[-length:] in self._beginnings
            for length in range(1, min(self._longest, len(text) + 1))
        )

    def may_complete(self, text: str) -> bool:
        """Returns whether the start of the text could be the end of a special token."""
        return any(
            text[:length] in self._endings for length in range(1, min(self._longest, len(text) + 1))
        )


class Guard:
    """Protects user strings in one rendering."""

    def __init__(self, special: SpecialText) -> None:
        self._special = special
        self._key = "".join(secrets.choice("0123456789") for _ in range(32))
        self._hidden: list[str] = []

    @property
    def used(self) -> bool:
        """Whether any string needed protection."""
        return bool(self._hidden)

    @property
    def end_mark(self) -> str:
        """Marker that survives the template and represents no text."""
        return f"{self._key}end"

    def protect(self, value: Any) -> Any:
        """Protects all strings in a JSON-like value, including dict keys."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(entry) for entry in value]
        return value

    def split(self, rendered: str) -> Iterator[str | int]:
        """Splits rendered text into special token ids of the template and restored texts."""
        end = 0
        for spelled in self._special.find(rendered):
            if spelled.start > end:
                yield self.reveal(rendered[end : spelled.start])
            yield spelled.token_id
            end = spelled.stop
        if end < len(rendered):
            yield self.reveal(rendered[end:])

    def _protect_text(self, text: str) -> str:
        pieces, end = [], 0
        for spelled in self._special.find(text):
            pieces += [text[end : spelled.start], self._hide(text[spelled.start : spelled.stop])]
            end = spelled.stop
        pieces.append(text[end:])
        return self._protect_edges("".join(pieces))

    def _protect_edges(self, text: str) -> str:
        """Inserts empty markers if the start or end could form a special token with adjacent text,
        even after trimming.
        """
        body = text.strip()
        if not body:
            return text
        start = text.index(body)
        if self._special.may_continue(body):
            text = text[: start + len(body)] + self._hide("") + text[start + len(body) :]
        if self._special.may_complete(body):
            text = text[:start] + self._hide("") + text[start:]
        return text

    def _hide(self, text: str) -> str:
        """Returns the number that represents a text."""
        self._hidden.append(text)
        return f"{self._key}{len(self._hidden) - 1:06d}"

    def reveal(self, text: str) -> str:
        """Restores the original strings in rendered text."""
        return re.sub(rf"{self._key}(\d{{6}})", lambda match: self._hidden[int(match[1])], text)
