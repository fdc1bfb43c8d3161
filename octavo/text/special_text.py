"""Keeps text that spells a special token apart from the special token itself, through a chat
template.

A user's strings go into the template with every such spelling replaced by an unguessable word of
digits, which survives trimming, case changes and JSON. In the rendered text all spellings are then
the template's own; the words become text again piece by piece. Strings without such a spelling pass
untouched, so templates that look into them see what the user wrote.
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
    """A special token where a text spells it: characters `start` to `stop`."""

    token_id: int
    start: int
    stop: int


class SpecialText:
    """The special tokens of one tokenizer, by id. They are found by a tokenizer that knows nothing
    else, so that matching is the package's own.
    """

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        texts = [token.content for token in tokens.values()]
        self._ids = list(tokens)
        self._contents = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        """Pattern of all spellings: it sees a hundred times faster than the package that there is
        nothing to find.
        """
        self._finder = Tokenizer(models.BPE())
        self._finder.add_special_tokens(list(tokens.values()))
        self._beginnings = {text[:end] for text in texts for end in range(1, len(text))}
        self._endings = {text[start:] for text in texts for start in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def find(self, text: str) -> list[Spelled]:
        """Returns every special token that the text spells, in order."""
        check_unicode(text)
        if self._contents.search(text) is None:
            return []
        found = encode_with_offsets(self._finder, text)
        return [
            Spelled(self._ids[i], start, stop)
            for i, (start, stop) in zip(found.ids, found.offsets, strict=True)
        ]

    def leading(self, text: str) -> int:
        """Returns where the special tokens at the text's very front end."""
        end = 0
        for spelled in self.find(text):
            if spelled.start != end:
                break
            end = spelled.stop
        return end

    def guard(self) -> Guard:
        """Makes the protection of one rendering."""
        return Guard(self)

    def may_continue(self, text: str) -> bool:
        """Tells whether the text's end could be the beginning of a special token that the next text
        completes.
        """
        return any(
            text[-length:] in self._beginnings
            for length in range(1, min(self._longest, len(text) + 1))
        )

    def may_complete(self, text: str) -> bool:
        """Tells whether the text's front could be the end of a special token that the text before
        began.
        """
        return any(
            text[:length] in self._endings for length in range(1, min(self._longest, len(text) + 1))
        )


class Guard:
    """Protection of the users' strings in one rendering."""

    def __init__(self, special: SpecialText) -> None:
        self._special = special
        self._key = "".join(secrets.choice("0123456789") for _ in range(32))
        self._hidden: list[str] = []

    @property
    def used(self) -> bool:
        """Whether some string needed protection."""
        return bool(self._hidden)

    @property
    def end_mark(self) -> str:
        """A word that marks a place in a text through the template; it stands for no text."""
        return f"{self._key}end"

    def protect(self, value: Any) -> Any:
        """Returns a value with every string in it protected: lists, dicts (keys too) and all else
        that JSON has.
        """
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(entry) for entry in value]
        return value

    def split(self, rendered: str) -> Iterator[str | int]:
        """Yields the ids of the template's special tokens, and the texts between them as their
        writers wrote them.
        """
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
        """Puts empty words where a front or an end could become a special token together with its
        neighbour, even after trimming.
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
        """Returns the word of digits that stands for a text."""
        self._hidden.append(text)
        return f"{self._key}{len(self._hidden) - 1:06d}"

    def reveal(self, text: str) -> str:
        """Returns a rendered text as its writers wrote it."""
        return re.sub(rf"{self._key}(\d{{6}})", lambda match: self._hidden[int(match[1])], text)
