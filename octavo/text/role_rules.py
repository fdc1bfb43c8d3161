"""Determines which role sequences a chat template supports, by rendering short conversations.

A template may raise an error for a late system message, or silently drop its text; both count as
unsupported. `server/roles.py` adapts conversations accordingly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.api.errors import InvalidRequest
from octavo.text.ports import RoleRules

CALL_ID = "a1b2c3d4e"
"""A call id in the format that Mistral's templates require."""
ARGUMENT = "Fir"
"""Argument text of a call, which must appear in the rendered text."""
CALL_FORMS = tuple(
    (has_content, is_object) for has_content in (True, False) for is_object in (True, False)
)
"""Combinations of (calls_have_content, arguments_are_objects), the most common one first."""
PARAMETERS = {"type": "object", "properties": {}}
TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "Finds it.", "parameters": PARAMETERS},
}
VARIABLES: tuple[dict[str, Any], ...] = ({}, {"tools": [TOOL]})
"""Template variables to try: a template for tools may require some."""
WORDS = ("Amber", "Birch", "Cedar", "Dahlia", "Elder")
"""Contents of the probe messages; each must appear in the rendered text."""
LATE_SYSTEM = (
    ("user", "assistant", "system", "user"),
    ("system", "user", "system"),
)
LATE_DEVELOPER = ("user", "assistant", "developer", "user")

Render = Callable[[Sequence[Any], bool, Mapping[str, Any]], str]
"""Renders messages with add_generation_prompt and variables, like ChatTemplate.render."""


def find_role_rules(render: Render) -> RoleRules:
    """Returns the role sequences that a template supports; all of them if it cannot even render a
    single user message.
    """
    for variables in VARIABLES:
        probe = RoleProbe(render, variables)
        if probe.accepts("user"):
            return probe.find_rules()
    return RoleRules()


class RoleProbe:
    """Probes one template with fixed variables."""

    def __init__(self, render: Render, variables: Mapping[str, Any]) -> None:
        self._render = render
        self._variables = variables

    def find_rules(self) -> RoleRules:
        developer = self.accepts("developer", "user")
        form = next((form for form in CALL_FORMS if self._accepts_call(*form)), CALL_FORMS[0])
        late = (*LATE_SYSTEM, LATE_DEVELOPER) if developer else LATE_SYSTEM
        return RoleRules(
            system=self.accepts("system", "user"),
            developer=developer,
            system_alone=self.accepts("system"),
            system_anywhere=all(self.accepts(*roles) for roles in late),
            repeats=self.accepts("user", "user")
            and self.accepts("user", "assistant", "assistant", "user"),
            assistant_first=self.accepts("assistant", "user"),
            user_after_tool=self._accepts_user_after_tool(*form),
            calls_have_content=form[0],
            arguments_are_objects=form[1],
        )

    def accepts(self, *roles: str) -> bool:
        """Returns whether messages with these roles render."""
        return self._renders(
            [{"role": role, "content": word} for role, word in zip(roles, WORDS, strict=False)]
        )

    def _accepts_call(self, has_content: bool, is_object: bool) -> bool:
        messages = _call_messages(has_content, is_object)
        return self._renders(messages) and ARGUMENT in self._render(messages, True, self._variables)

    def _accepts_user_after_tool(self, has_content: bool, is_object: bool) -> bool:
        """Returns whether a user message may directly follow a tool result; True without tool
        support.
        """
        messages = _call_messages(has_content, is_object)
        after = [*messages, {"role": "user", "content": WORDS[2]}]
        return not self._renders(messages) or self._renders(after)

    def _renders(self, messages: Sequence[dict[str, Any]]) -> bool:
        """Returns whether a conversation renders with all of its texts."""
        try:
            text = self._render(messages, True, self._variables)
        except InvalidRequest:
            return False
        return all((message["content"] or "") in text for message in messages)


def _call_messages(has_content: bool, is_object: bool) -> list[dict[str, Any]]:
    """Returns a question, a call in one of its forms, and the call's result."""
    arguments = {"word": ARGUMENT}
    function = {"name": "find", "arguments": arguments if is_object else json.dumps(arguments)}
    call = {"id": CALL_ID, "type": "function", "function": function}
    return [
        {"role": "user", "content": WORDS[0]},
        {"role": "assistant", "content": "" if has_content else None, "tool_calls": [call]},
        {"role": "tool", "name": "find", "content": WORDS[1], "tool_call_id": CALL_ID},
    ]
