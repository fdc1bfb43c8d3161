"""Common parts of tool-call bodies: a call begins once its name is known, and always has
arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from octavo.text.grammar.arguments import TEXT_ONLY, ArgumentTypes, parse_argument_types
from octavo.text.grammar.schema import SchemaError
from octavo.text.parsers.parts import PartList
from octavo.text.parsers.source import MalformedText, Steps, TextSource

MAX_NAME = 256
"""Maximum length of a function name in characters."""
NAME = re.compile(r"[\w.:/\-]+")
"""Characters of an unquoted name."""
QUOTED_NAME = re.compile(r"[\w.:/ \-]+")


class FunctionTypes:
    """Offered functions and the JSON types of their parameters."""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """`functions` maps names to the JSON schemas of their arguments."""
        self._functions = functions
        self._types: dict[str, ArgumentTypes | None] = {}

    @property
    def names(self) -> Collection[str]:
        return self._functions.keys()

    def get_types(self, function: str, parameter: str) -> frozenset[str]:
        """Returns a parameter's JSON types; only strings if it is unknown."""
        if function not in self._types:
            self._types[function] = self._read(function)
        types = self._types[function]
        return TEXT_ONLY if types is None else types.of(parameter)

    def _read(self, function: str) -> ArgumentTypes | None:
        schema = self._functions.get(function)
        if schema is None:
            return None
        try:
            return parse_argument_types(json.dumps(schema))
        except SchemaError:
            return None


class CallWriter:
    """Writes the current call; emits nothing before its name is known."""

    def __init__(self, parts: PartList, known: Collection[str] | None = None) -> None:
        """`known` restricts the function names that are accepted; None allows all."""
        self._parts = parts
        self._known = known
        self._has_arguments = False
        self.has_begun = False
        self.name = ""

    def begin(self, name: str, call_id: str = "") -> None:
        """Begins the call; raises MalformedText for an invalid name."""
        if len(name) > MAX_NAME or QUOTED_NAME.fullmatch(name) is None:
            raise MalformedText
        if self._known is not None and name not in self._known:
            raise MalformedText
        self.name = name
        self.has_begun = True
        self._parts.begin_call(name, call_id)

    def add_arguments(self, text: str) -> None:
        self._has_arguments = self._has_arguments or bool(text)
        self._parts.add_arguments(text)

    def end(self) -> None:
        """Ends the call; missing arguments become an empty object."""
        if not self._has_arguments:
            self._parts.add_arguments("{}")


class CallBody(Protocol):
    """The part of a format that reads calls between its markers."""

    @property
    def openings(self) -> Sequence[str]:
        """Characters that may start a body without a marker; () if a marker is required."""
        ...

    @property
    def marks(self) -> Sequence[str]:
        """Texts within a body that may be special tokens."""
        ...

    def arguments_form(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the constraint of arguments with a JSON schema, as fields of a structure."""
        ...

    def read(self, source: TextSource, section: CallSection) -> Steps[None]:
        """Reads the calls; raises MalformedText if the text does not match."""
        ...


class CallSection:
    """Calls between two markers."""

    def __init__(
        self,
        source: TextSource,
        parts: PartList,
        types: FunctionTypes,
        known: Collection[str] | None = None,
    ) -> None:
        self.types = types
        self._source = source
        self._parts = parts
        self._known = known
        self.writer = CallWriter(parts, known)

    def next_call(self) -> CallWriter:
        """Returns the writer of the next call and commits the text before it."""
        if self.writer.has_begun:
            self._source.hold()
        self.writer = CallWriter(self._parts, self._known)
        return self.writer


def json_piece(text: str) -> str:
    """Escapes a text for use within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
