"""The form that an answer is to have: as a user asks for it (StructuredOutputs), and as the engine
carries it to the worker (GrammarSpec).

Types and "exactly one of" are checked when it is made; whether a schema or grammar can be met is
checked when a request is admitted (`text/grammar`). Names are vLLM's.
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
"""Fields of which exactly one is given."""

ALLOWED: dict[str, tuple[tuple[type, ...], str]] = {
    "json": ((dict, str, bool), "a JSON schema: an object, its text, or True"),
    "json_object": ((bool,), "True"),
    "regex": ((str,), "a regular expression"),
    "choice": ((list, tuple), "a list of at least one text, none of them empty"),
    "grammar": ((str,), "a grammar in Lark's or GBNF's notation"),
    "structural_tag": ((dict, str), "an object of structures and triggers, or its text"),
}


class MessageFrame(msgspec.Struct, kw_only=True, frozen=True):
    """How an answer of several messages is written: each has a header and a text, and structures
    stand in place of whole messages.
    """

    opening: str
    """Text that begins a message's header."""
    text: str
    """Text between a header and the message's text."""
    between: str
    """Text between two messages."""
    unlike: tuple[str, ...]
    """Texts that stand in the headers of structures alone."""
    thought: str = ""
    """Header of reasoning before the first message; "": there is none."""
    has_begun: bool = False
    """Whether the prompt has begun the reasoning."""
    most_tokens: int | None = None
    """Most tokens of the reasoning; None: no limit."""
    may_end_in_thought: bool = False
    """Whether the answer may end inside the reasoning."""


class StructuredOutputs(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=CheckedCall):
    """The form of an answer: exactly one of json, json_object, regex, choice, grammar and
    structural_tag.
    """

    json: dict[str, Any] | str | bool | None = None
    """JSON schema that the answer meets."""
    json_object: bool | None = None
    """True: the answer is a JSON object."""
    regex: str | None = None
    """Regular expression that the whole answer matches."""
    choice: list[str] | None = None
    """Texts of which the answer is one."""
    grammar: str | None = None
    """Grammar of the answer, in Lark's notation as llguidance reads it, or in GBNF's."""
    structural_tag: dict[str, Any] | str | None = None
    """Free text, within which each of the triggers begins a text of a given form."""
    or_structural_tag: dict[str, Any] | None = None
    """Structures that the answer may be instead of JSON, a regex, a choice or a grammar, such as
    calls of functions.
    """
    frame: MessageFrame | None = None
    """Messages around the structures of a structural tag; None: free text."""
    disable_any_whitespace: bool | None = None
    """Whitespace between the parts of JSON. True: none; False: up to 8 characters of any kind;
    None: one space after each comma and colon, as `json.dumps` writes it (in structural tags as
    False).
    """
    whitespace_pattern: str | None = None
    """Regular expression of the whitespace between the parts of JSON."""
    disable_additional_properties: bool | None = None
    """Whether objects whose schema is silent about `additionalProperties` have only the properties
    that it names; None: as the engine is configured, by default True.
    """
    starts_after: str = ""
    """Text after which the form begins, such as the end of a reasoning; "": it begins at once."""
    begins_with: str = ""
    """Text with which an answer begins that goes on to `starts_after`; where it begins otherwise,
    the form begins at once. "": the answer always goes on to `starts_after`.
    """
    most_tokens_before: int | None = None
    """Number of tokens after which `starts_after` is forced; None: no limit."""
    may_end_before: bool = False
    """Whether the answer may end before `starts_after`, as it may without a form."""
    given_as: str = "structured_outputs"
    """Name of the request's field that it came from, for messages."""

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise InvalidRequest(
                f"{self.given_as}: got {got}, needed is exactly one of {', '.join(FORMS)}",
                param=self.given_as,
            )
        types, words = ALLOWED[given[0]]
        value = getattr(self, given[0])
        self._check(given[0], isinstance(value, types) and value not in ("", [], ()), words)
        if self.json_object is not None:
            self._check("json_object", self.json_object, words)
        if self.choice is not None:
            self.choice = list(self.choice)
            texts = all(isinstance(text, str) and text for text in self.choice)
            self._check("choice", texts, words)
        self._check_options()

    @property
    def kind(self) -> GrammarKind:
        """Name of the field that is given."""
        return next(name for name in FORMS if getattr(self, name) is not None)

    @property
    def tag(self) -> dict[str, Any]:
        """The structural tag as an object; {} where it is none, which admission refuses."""
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
        self._check("whitespace_pattern", pattern is None or _is_text(pattern), "a regex or None")
        for name in ("starts_after", "begins_with"):
            self._check(name, isinstance(getattr(self, name), str), "a text")
        frame = self.frame
        self._check("frame", frame is None or isinstance(frame, MessageFrame), "None")
        most = self.most_tokens_before
        self._check("most_tokens_before", most is None or _is_count(most), "None, or a count")
        if pattern is not None and self.disable_any_whitespace:
            raise InvalidRequest(
                f"{self.given_as}: got whitespace_pattern with disable_any_whitespace, allowed is"
                " one of them",
                param=self.given_as,
            )

    def _check(self, name: str, ok: object, words: str) -> None:
        if not ok:
            got = shown(getattr(self, name))
            raise InvalidRequest(
                f"{self.given_as}.{name}: got {got}, allowed is {words}", param=self.given_as
            )


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A checked grammar, as it goes to the worker."""

    kind: GrammarKind
    text: str
    """Grammars as llguidance reads them, a JSON list of which the first is the answer's."""
    starts_after: str = ""
    """Text after which the grammar begins; "": it begins at once."""
    begins_with: str = ""
    most_tokens_before: int | None = None
    may_end_before: bool = False
    num_given_tokens: int = 0
    """Number of the prompt's last tokens that are the beginning of the grammar's text."""

    @property
    def digest(self) -> bytes:
        """Name of what is compiled."""
        limits = f"{self.most_tokens_before}\0{self.may_end_before}"
        parts = (self.starts_after, self.begins_with, limits, self.text)
        return blake2b("\0".join(parts).encode(), digest_size=16).digest()


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
