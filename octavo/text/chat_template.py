"""Renders chat templates: sandboxed Jinja with limits and the functions that Hugging Face templates
expect.

jinja2 (40 ms) is imported when the first conversation is rendered. Source of the functions and the
two `blocks` settings: transformers' documentation of chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from octavo.api.errors import InvalidRequest
from octavo.text.ports import RoleRules
from octavo.text.role_rules import find_role_rules
from octavo.text.template_bounds import bound_filters, bounded_environment, render

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes


HINT = "check the order and roles of the messages; --chat-template sets another template"

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Message keys that may contain reasoning."""


class ChatTemplate:
    """A chat template of a model; rendering raises an error if `source` is None."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        """The tokenizer's special tokens, by their template variable names."""

    @property
    def exists(self) -> bool:
        return self.source is not None

    def replaced(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self.special_tokens)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Undeclared variables of the template; empty without a template."""
        from jinja2 import meta

        return (
            frozenset()
            if self.source is None
            else frozenset(meta.find_undeclared_variables(self._parsed))
        )

    def render(
        self, messages: Sequence[Any], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Renders a conversation.

        Raises InvalidRequest with the template's message if it fails. Developer messages become
        system messages if the template does not support them.
        """
        if self.source is None:
            raise InvalidRequest(
                "messages: the model has no chat template",
                param="messages",
                hint="set one with --chat-template, or use completions",
            )
        try:
            compiled = self._compiled
            prepared = [_with_reasoning(message) for message in messages]
            known = self.special_tokens | {
                "messages": prepared if self._has_developer_role else _as_system(prepared),
                "add_generation_prompt": add_generation_prompt,
            }
            return render(compiled, {"tools": None, "documents": None} | known | dict(variables))
        except Exception as error:  # depending on its input, a template can raise any error
            reason = str(error) or type(error).__name__
            raise InvalidRequest(
                f"messages: the chat template failed: {reason}",
                hint=HINT,
                param="messages",
            ) from error

    @cached_property
    def role_rules(self) -> RoleRules:
        """Role sequences that the template supports."""
        return RoleRules() if self.source is None else find_role_rules(self.render)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        assert self.source is not None
        return _environment().from_string(self.source)

    @cached_property
    def _parsed(self) -> jinja2.nodes.Template:
        assert self.source is not None
        return _environment().parse(self.source)

    @cached_property
    def _has_developer_role(self) -> bool:
        from jinja2 import nodes

        constants = (node.value for node in self._parsed.find_all(nodes.Const))
        return any(value == "developer" for value in constants)


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The chat templates of one model."""

    default: ChatTemplate
    with_tools: ChatTemplate
    """Template for conversations with tools."""
    named: Mapping[str, ChatTemplate]
    """The model's own templates by name."""

    def choose(self, requested: str | None = None, *, has_tools: bool = False) -> ChatTemplate:
        """Returns the template for a request, by name or as Jinja text; by default the model's
        choice.
        """
        if requested is None:
            return self.with_tools if has_tools else self.default
        return (
            self.named[requested] if requested in self.named else self.default.replaced(requested)
        )


def _with_reasoning(message: Any) -> Any:
    """Adds the key names for reasoning that templates read: `thinking` (gpt-oss) and
    `reasoning_content`.
    """
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return (
        message
        if reasoning is None
        else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def _as_system(messages: Sequence[Any]) -> list[Any]:
    """Converts developer messages to system messages."""
    return [
        {**message, "role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]


def _environment() -> jinja2.Environment:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        """Tag `{% generation %} ... {% endgeneration %}`, which marks training text; renders its
        contents in a scope of its own.
        """

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_contents")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _contents(self, caller: Callable[[], str]) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = bounded_environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = to_json
    bound_filters(environment)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
