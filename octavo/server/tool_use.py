"""Tools of a request and the tool choice, in a common form for all APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic_core import from_json

from octavo.api.errors import InvalidRequest, did_you_mean, shown
from octavo.server.http.request_limits import RequestLimits
from octavo.server.ignored import IgnoredFields, quote_label
from octavo.text.grammar.enforceable import enforceable
from octavo.text.grammar.schema import SchemaError
from octavo.text.parsers.formats import ChannelFormat, ToolFormat
from octavo.text.parsers.function_names import get_aliases

MAX_NAME = 256
"""Maximum length of a function's name in characters."""

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""Schema of a function without arguments."""

Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_ARGUMENTS)
    """JSON schema of its arguments."""
    description: str | None = None
    is_strict: bool = False
    """Whether arguments must match the schema even with tool choice "auto"."""

    @property
    def definition(self) -> dict[str, Any]:
        """The function in OpenAI's format, for chat templates."""
        about = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **about, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolNames:
    """An API's field names, for error messages."""

    tools: str = "tools"
    choice: str = "tool_choice"
    name: str = "function.name"
    parameters: str = "function.parameters"


OPENAI_NAMES = ToolNames()


@dataclass(frozen=True, slots=True)
class ToolUse:
    functions: Sequence[OfferedFunction]
    choice: Choice = "auto"
    is_parallel: bool = True
    """Whether one response may contain several calls."""
    allowed: frozenset[str] | None = None
    """Names of the allowed functions; None: all."""
    names: ToolNames = OPENAI_NAMES
    ignored: IgnoredFields = field(default_factory=IgnoredFields)
    """Receives schema keywords that grammars do not enforce."""

    @property
    def callable(self) -> list[OfferedFunction]:
        """Functions that this response may call."""
        if self.allowed is None:
            return list(self.functions)
        return [function for function in self.functions if function.name in self.allowed]

    def get_enforced_schemas(self) -> dict[str, Mapping[str, Any]]:
        """Returns the enforceable schemas of callable functions, by name. Other keywords are
        reported as ignored, or raise InvalidRequest for strict functions.
        """
        return {one.name: self._enforced(one) for one in self.callable}

    def _enforced(self, function: OfferedFunction) -> Mapping[str, Any]:
        where = f"{self.names.tools}[{self.functions.index(function)}].{self.names.parameters}"
        try:
            unenforced = enforceable(function.parameters, is_strict=function.is_strict)
        except SchemaError as error:
            raise InvalidRequest(
                f"{where}: {error}",
                hint="without strict, unsupported keywords are ignored",
                param=where,
            ) from None
        shown = f"{self.names.tools}[{quote_label(function.name)}]"
        shown += f".{self.names.parameters.rpartition('.')[2]}"
        self.ignored.add_keywords(unenforced.dropped, where, shown)
        return unenforced.schema

    def aliases(self, tools: ToolFormat | ChannelFormat) -> dict[str, str]:
        """Returns aliases of functions whose names the format cannot represent."""
        return get_aliases(tools, [function.name for function in self.functions])

    def definitions(self, aliases: Mapping[str, str]) -> list[dict[str, Any]]:
        """Returns the definitions of all functions, for the chat template."""
        return [
            replace(function, name=aliases.get(function.name, function.name)).definition
            for function in self.functions
        ]


def make_tool_use(
    functions: Sequence[OfferedFunction],
    choice: Choice | None,
    limits: RequestLimits,
    *,
    named: Sequence[str] | None = None,
    is_parallel: bool = True,
    names: ToolNames = OPENAI_NAMES,
    ignored: IgnoredFields,
) -> ToolUse | None:
    """Builds the checked tools of a request; None if it may not call any.

    `named` restricts the callable functions. Raises InvalidRequest for a choice without functions,
    conflicting names, or an exceeded limit. If unknown tools were ignored, a tool choice that
    requires them is ignored too.
    """
    known = [function.name for function in functions]
    if ignored.drops_entries(names.tools) and not _is_satisfied(choice, named, known):
        ignored.add(names.choice, "it requires a tool that is ignored")
        choice, named = "auto", None
    functions = _without_copies(functions, names, ignored)
    if not functions:
        if choice == "required" or named is not None:
            raise InvalidRequest(f"{names.choice}: requires {names.tools}", param=names.choice)
        return None
    _check_functions(functions, limits, names)
    for name in named or ():
        if name not in known:
            raise InvalidRequest(
                f"{names.choice}: got the function {shown(name)}, expected {', '.join(known)}",
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
    """Removes exact duplicates, which are reported as ignored."""
    unique: list[OfferedFunction] = []
    by_name: dict[str, OfferedFunction] = {}
    for index, function in enumerate(functions):
        first = by_name.setdefault(function.name, function)
        if first is not function and first == function:
            shown_as = f"{names.tools}[{quote_label(function.name)}]"
            path = f"{names.tools}[{index}].{names.name}"
            ignored.add(path, _describe_duplicate(function.name), shown_as=shown_as)
        else:
            unique.append(function)
    return unique


def _is_satisfied(choice: Choice | None, named: Sequence[str] | None, known: Sequence[str]) -> bool:
    """Returns whether the functions that a tool choice requires exist."""
    if named is not None:
        return not set(named).isdisjoint(known)
    return choice != "required" or bool(known)


def _check_functions(
    functions: Sequence[OfferedFunction], limits: RequestLimits, names: ToolNames
) -> None:
    if len(functions) > limits.max_tools:
        raise InvalidRequest(
            f"{names.tools}: got {len(functions)} tools, expected at most {limits.max_tools}",
            hint="the server option --max-tools sets this limit",
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
            f"{names.tools}: got {size} bytes of definitions, expected at most"
            f" {limits.max_tool_bytes}",
            hint="the server option --max-tool-bytes sets this limit",
            param=names.tools,
        )


def _check_name(name: str, seen: set[str], where: str) -> None:
    if not 0 < len(name.strip()) <= len(name) <= MAX_NAME:
        raise InvalidRequest(
            f"{where}: got {shown(name)}, expected a name of 1 to {MAX_NAME} characters",
            param=where,
        )
    if name in seen:
        raise InvalidRequest(f"{where}: {_describe_duplicate(name)}", param=where)


def _describe_duplicate(name: str) -> str:
    return f"got {shown(name)} twice, tool names must be unique"


def parse_arguments(arguments: object) -> dict[str, Any]:
    """Parses the arguments of a tool call in the history to an object, for the chat template.

    Truncated JSON (from a response at its token limit) is parsed as far as possible; other values
    that are not objects become {"arguments": value}.
    """
    parsed = arguments
    for _ in range(2):  # some clients encode the JSON text twice
        if isinstance(parsed, str):
            try:
                parsed = from_json(parsed or "{}", allow_partial="trailing-strings")
            except ValueError:
                break
    if parsed is None:
        return {}
    return parsed if isinstance(parsed, dict) else {"arguments": arguments}


def rename_functions(
    messages: Sequence[dict[str, Any]], aliases: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Replaces function names by their aliases, in calls and results."""
    return [_rename(message, aliases) for message in messages]


def _rename(message: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    renamed = dict(message)
    if renamed["role"] == "tool" and renamed.get("name") in aliases:
        renamed["name"] = aliases[renamed["name"]]
    if renamed.get("tool_calls"):
        renamed["tool_calls"] = [
            {**call, "function": {**call["function"], "name": aliases.get(name, name)}}
            for call in renamed["tool_calls"]
            for name in [call["function"]["name"]]
        ]
    return renamed


def check_role(role: str, needed: str, where: str) -> None:
    """Raises InvalidRequest for a part that only messages of role `needed` may contain."""
    if role != needed:
        raise InvalidRequest(
            f"{where}: not supported in a message of the role {role!r}, expected {needed!r}",
            param=where,
        )
