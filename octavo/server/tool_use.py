"""The functions that a request offers the model, and whether it may or must call one.

Checked once, in the terms that all APIs share; each API's bodies are turned into these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic_core import from_json

from octavo.api.errors import InvalidRequest, did_you_mean, shown
from octavo.server.http.request_limits import RequestLimits
from octavo.server.ignored import IgnoredFields, label_of
from octavo.text.grammar.enforceable import enforceable
from octavo.text.grammar.schema import SchemaError
from octavo.text.parsers.formats import ChannelFormat, ToolFormat
from octavo.text.parsers.function_names import get_aliases

MAX_NAME = 256
"""Most characters of a function's name."""

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""Schema of a function that takes no arguments."""

Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_ARGUMENTS)
    """JSON schema of its arguments."""
    description: str | None = None
    is_strict: bool = False
    """Whether its arguments must meet the schema even where the call is the model's own choice."""

    @property
    def definition(self) -> dict[str, Any]:
        """Description in OpenAI's form, which chat templates read."""
        about = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **about, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolNames:
    """Names that an API has for what is checked here, for messages."""

    tools: str = "tools"
    choice: str = "tool_choice"
    name: str = "function.name"
    parameters: str = "function.parameters"


OPENAI_NAMES = ToolNames()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Functions and how they may be called."""

    functions: Sequence[OfferedFunction]
    choice: Choice = "auto"
    is_parallel: bool = True
    """Whether one answer may call several functions."""
    allowed: frozenset[str] | None = None
    """Names of the functions that may be called; None for all."""
    names: ToolNames = OPENAI_NAMES
    ignored: IgnoredFields = field(default_factory=IgnoredFields)
    """Where keywords of schemas are added that no grammar enforces."""

    @property
    def callable(self) -> list[OfferedFunction]:
        """Functions that this answer may call."""
        if self.allowed is None:
            return list(self.functions)
        return [function for function in self.functions if function.name in self.allowed]

    def enforced(self) -> dict[str, Mapping[str, Any]]:
        """Returns the schemas of the callable functions as grammars enforce them, by name. Other
        keywords are ignored; raises InvalidRequest for those of a strict function.
        """
        return {one.name: self._enforced(one) for one in self.callable}

    def _enforced(self, function: OfferedFunction) -> Mapping[str, Any]:
        where = f"{self.names.tools}[{self.functions.index(function)}].{self.names.parameters}"
        try:
            found = enforceable(function.parameters, is_strict=function.is_strict)
        except SchemaError as error:
            raise InvalidRequest(
                f"{where}: {error}",
                hint="without strict, keywords that no grammar enforces are ignored",
                param=where,
            ) from None
        shown = f"{self.names.tools}[{label_of(function.name)}]"
        shown += f".{self.names.parameters.rpartition('.')[2]}"
        self.ignored.add_keywords(found.dropped, where, shown)
        return found.schema

    def aliases(self, tools: ToolFormat | ChannelFormat) -> dict[str, str]:
        """Returns the aliases of the functions of which a format cannot write the name."""
        return get_aliases(tools, [function.name for function in self.functions])

    def definitions(self, aliases: Mapping[str, str]) -> list[dict[str, Any]]:
        """Returns the descriptions of all functions, for the chat template."""
        return [
            replace(function, name=aliases.get(function.name, function.name)).definition
            for function in self.functions
        ]


def tool_use_of(
    functions: Sequence[OfferedFunction],
    choice: Choice | None,
    limits: RequestLimits,
    *,
    named: Sequence[str] | None = None,
    is_parallel: bool = True,
    names: ToolNames = OPENAI_NAMES,
    ignored: IgnoredFields,
) -> ToolUse | None:
    """Returns what a request may call; None where it can call nothing.

    `named` are the only functions that may be called. Raises InvalidRequest for a choice without
    functions, for names at odds, and for what is beyond a limit. If tools of the request are
    ignored, a choice that none of the others satisfies is ignored too.
    """
    known = [function.name for function in functions]
    if ignored.drops_entries_of(names.tools) and not _is_satisfied(choice, named, known):
        ignored.add(names.choice, "it needs a tool that is ignored")
        choice, named = "auto", None
    functions = _without_copies(functions, names, ignored)
    if not functions:
        if choice == "required" or named is not None:
            raise InvalidRequest(
                f"{names.choice}: needs {names.tools}, and none are given", param=names.choice
            )
        return None
    _check_functions(functions, limits, names)
    for name in named or ():
        if name not in known:
            raise InvalidRequest(
                f"{names.choice}: got the function {shown(name)}, allowed are {', '.join(known)}",
                hint=did_you_mean(name, known),
                param=names.choice,
            )
    if choice == "none":
        return None
    allowed = None if named is None else frozenset(named)
    return ToolUse(functions, choice or "auto", is_parallel, allowed, names, ignored)


def _without_copies(
    functions: Sequence[OfferedFunction], names: ToolNames, ignored: IgnoredFields
) -> list[OfferedFunction]:
    """Returns functions without those that are equal to an earlier one, which are ignored."""
    kept: list[OfferedFunction] = []
    by_name: dict[str, OfferedFunction] = {}
    for index, function in enumerate(functions):
        first = by_name.setdefault(function.name, function)
        if first is not function and first == function:
            shown_as = f"{names.tools}[{label_of(function.name)}]"
            path = f"{names.tools}[{index}].{names.name}"
            ignored.add(path, _twice(function.name), shown_as=shown_as)
        else:
            kept.append(function)
    return kept


def _is_satisfied(choice: Choice | None, named: Sequence[str] | None, known: Sequence[str]) -> bool:
    """Returns whether the functions that a choice needs are there."""
    if named is not None:
        return not set(named).isdisjoint(known)
    return choice != "required" or bool(known)


def _check_functions(
    functions: Sequence[OfferedFunction], limits: RequestLimits, names: ToolNames
) -> None:
    if len(functions) > limits.max_tools:
        raise InvalidRequest(
            f"{names.tools}: got {len(functions)} tools, allowed are at most {limits.max_tools}",
            hint="the server's --max-tools sets it",
            param=names.tools,
        )
    seen: set[str] = set()
    size = 0
    for index, function in enumerate(functions):
        where = f"{names.tools}[{index}]"
        _check_name(function.name, seen, f"{where}.{names.name}")
        seen.add(function.name)
        size += len(json.dumps(function.definition))
    if size > limits.max_tool_bytes:
        raise InvalidRequest(
            f"{names.tools}: got {size} bytes of definitions, allowed are at most"
            f" {limits.max_tool_bytes}",
            hint="the server's --max-tool-bytes sets it",
            param=names.tools,
        )


def _check_name(name: str, seen: set[str], where: str) -> None:
    if not 0 < len(name.strip()) <= len(name) <= MAX_NAME:
        raise InvalidRequest(
            f"{where}: got {shown(name)}, allowed is a name of 1 to {MAX_NAME} characters",
            param=where,
        )
    if name in seen:
        raise InvalidRequest(f"{where}: {_twice(name)}", param=where)


def _twice(name: str) -> str:
    return f"got {shown(name)} twice, each tool needs a name of its own"


def parse_arguments(given: object) -> dict[str, Any]:
    """Returns the arguments of a call in the history as an object, as templates read them.

    JSON text that was cut off, as in an answer that reached its token limit, is read as far as it
    goes; anything else that is not an object becomes the member "arguments" of one.
    """
    found = given
    for _ in range(2):  # some clients encode the text once more
        if isinstance(found, str):
            try:
                found = from_json(found or "{}", allow_partial="trailing-strings")
            except ValueError:
                break
    if found is None:
        return {}
    return found if isinstance(found, dict) else {"arguments": given}


def rename_functions(
    messages: Sequence[dict[str, Any]], aliases: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Returns a history in which functions with an alias have it, in calls and in results."""
    return [_renamed(message, aliases) for message in messages]


def _renamed(message: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    made = dict(message)
    if made["role"] == "tool" and made.get("name") in aliases:
        made["name"] = aliases[made["name"]]
    if made.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "name": aliases.get(name, name)}}
            for call in made["tool_calls"]
            for name in [call["function"]["name"]]
        ]
    return made


def check_role(role: str, needed: str, where: str) -> None:
    """Refuses a part of a message that only messages of the role `needed` have."""
    if role != needed:
        raise InvalidRequest(
            f"{where}: got it in a message of the role {role!r}, allowed is {needed!r}",
            param=where,
        )
