"""Structured output: the user's options (StructuredOutputs) and the grammar that the worker
receives (GrammarSpec).

Types and "exactly one of" are checked here; whether a schema or grammar is supported is checked
when a request is admitted (`text/grammar`). Names are vLLM's.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal

import msgspec

from octavo.api.checked_call import CheckedCall
from octavo.api.errors import InvalidRequest, shown

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]

FORMS: tuple[GrammarKind, ...] = (
    "json",
    "json_object",
    "regex",
    "choice",
    "grammar",
    "structural_tag",
)

ALLOWED: dict[str, tuple[tuple[type, ...], str]] = {
    "json": ((dict, str, bool), "a JSON schema: an object, its text, or True"),
    "json_object": ((bool,), "True"),
    "regex": ((str,), "a regular expression"),
    "choice": ((list, tuple), "a list of at least one non-empty string"),
    "grammar": ((str,), "a grammar in Lark or GBNF notation"),
    "structural_tag": ((dict, str), "an object of structures and triggers, or its text"),
}


class MessageFrame(msgspec.Struct, kw_only=True, frozen=True):
    """Format of output that consists of several messages, each with a header and a text; tool calls
    take the place of whole messages.
    """

    opening: str
    """Text that begins a message's header."""
    text: str
    """Text between a header and the message's text."""
    between: str
    """Text between two messages."""
    unlike: tuple[str, ...]
    """Texts that only the headers of tool calls contain."""
    thought: str = ""
    """Header of reasoning before the first message; "": none."""
    has_begun: bool = False
    """Whether the prompt already contains the start of the reasoning."""
    most_tokens: int | None = None
    """Maximum number of reasoning tokens; None: no limit."""
    may_end_in_thought: bool = False
    """Whether the output may end inside the reasoning."""


class StructuredOutputs(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=CheckedCall):
    """Format of the output: exactly one of json, json_object, regex, choice, grammar and
    structural_tag.
    """

    json: dict[str, Any] | str | bool | None = None
    """JSON schema of the output; True: any JSON."""
    json_object: bool | None = None
    """True: the output is a JSON object."""
    regex: str | None = None
    """Regular expression that the whole output matches."""
    choice: list[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """Grammar of the output, in llguidance's Lark syntax or in GBNF."""
    structural_tag: dict[str, Any] | str | None = None
    """Free text in which each trigger begins a structure of a given format."""
    or_structural_tag: dict[str, Any] | None = None
    """Structures, such as tool calls, allowed in place of JSON, a regex, a choice or a grammar."""
    frame: MessageFrame | None = None
    """Message format around the structures of a structural tag; None: free text."""
    disable_any_whitespace: bool | None = None
    """Whitespace in JSON. True: none; False: up to 8 characters of any kind; None: one space after
    each comma and colon, as in `json.dumps` (in structural tags as False).
    """
    whitespace_pattern: str | None = None
    """Regular expression of the whitespace in JSON."""
    disable_additional_properties: bool | None = None
    """Whether objects whose schema does not set `additionalProperties` are limited to the listed
    properties; None: the engine's default, normally True.
    """
    starts_after: str = ""
    """Text after which the format applies, such as the end of reasoning; "": from the start."""
    begins_with: str = ""
    """Start of the part that `starts_after` ends; output that begins otherwise follows the format
    from the start. "": the output always contains that part.
    """
    most_tokens_before: int | None = None
    """Number of tokens after which `starts_after` is forced; None: no limit."""
    may_end_before: bool = False
    """Whether the output may end before `starts_after`."""
    given_as: str = "structured_outputs"
    """Request field that set this, for error messages."""

    def __post_init__(self) -> None:
        set_fields = [name for name in FORMS if getattr(self, name) is not None]
        if len(set_fields) != 1:
            got = ", ".join(set_fields) or "none"
            raise InvalidRequest(
                f"{self.given_as}: got {got}, expected exactly one of {', '.join(FORMS)}",
                param=self.given_as,
            )
        types, words = ALLOWED[set_fields[0]]
        value = getattr(self, set_fields[0])
        self._check(set_fields[0], isinstance(value, types) and value not in ("", [], ()), words)
        if self.json_object is not None:
            self._check("json_object", self.json_object, words)
        if self.choice is not None:
            self.choice = list(self.choice)
            texts = all(isinstance(text, str) and text for text in self.choice)
            self._check("choice", texts, words)
        self._check_options()

    @property
    def kind(self) -> GrammarKind:
        """Name of the field that is set."""
        return next(name for name in FORMS if getattr(self, name) is not None)

    @property
    def tag(self) -> dict[str, Any]:
        """The structural tag as an object; {} if it is invalid, which admission rejects."""
        found: object = self.structural_tag
        if isinstance(found, str):
            try:
                found = msgspec.json.decode(found)
            except msgspec.DecodeError:
                found = {}
        return dict(found) if isinstance(found, dict) else {}

    def _check_options(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            self._check(name, isinstance(getattr(self, name), bool | None), "True, False or None")
        pattern = self.whitespace_pattern
        self._check(
            "whitespace_pattern",
            pattern is None or _is_text(pattern),
            "a regular expression or None",
        )
        for name in ("starts_after", "begins_with"):
            self._check(name, isinstance(getattr(self, name), str), "a string")
        frame = self.frame
        self._check("frame", frame is None or isinstance(frame, MessageFrame), "None")
        max_tokens = self.most_tokens_before
        self._check(
            "most_tokens_before", max_tokens is None or _is_count(max_tokens), "None, or a count"
        )
        if pattern is not None and self.disable_any_whitespace:
            raise InvalidRequest(
                f"{self.given_as}: got whitespace_pattern with disable_any_whitespace, expected"
                " one of them",
                param=self.given_as,
            )

    def _check(self, name: str, ok: object, words: str) -> None:
        if not ok:
            got = shown(getattr(self, name))
            raise InvalidRequest(
                f"{self.given_as}.{name}: got {got}, expected {words}", param=self.given_as
            )


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A checked grammar, as sent to the worker."""

    kind: GrammarKind
    text: str
    """JSON list of llguidance grammars; the first is the start."""
    starts_after: str = ""
    """Text after which the grammar applies; "": from the start."""
    begins_with: str = ""
    most_tokens_before: int | None = None
    may_end_before: bool = False
    num_given_tokens: int = 0
    """Number of tokens at the end of the prompt that are the beginning of the grammar's text."""

    @property
    def digest(self) -> bytes:
        """Cache key of the compiled grammar."""
        limits = f"{self.most_tokens_before}\0{self.may_end_before}"
        parts = (self.starts_after, self.begins_with, limits, self.text)
        return blake2b("\0".join(parts).encode(), digest_size=16).digest()


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
