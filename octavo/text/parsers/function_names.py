"""Function names that a format can represent.

Clients use arbitrary names (`server/tool`, `My Tool`). A name that a format cannot represent gets
an alias in the prompt and in the output; the client sees its own name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from octavo.text.parsers.formats import NAME_HERE, ChannelFormat, ToolFormat, named_tool_format
from octavo.text.parsers.reader import MessageForm, read_message

PLAIN = re.compile(r"[\w./:-]+( [\w./:-]+)*")
"""Names without characters that are special in JSON, tags or chat templates."""
MAX_ALIAS = 64
"""Maximum length of an alias in characters."""


def get_aliases(tools: ToolFormat | ChannelFormat, names: Sequence[str]) -> dict[str, str]:
    """Returns unique aliases for names that a format cannot represent."""
    used_names = set(names)
    aliases: dict[str, str] = {}
    for name in names:
        if not _is_writable(tools.name, name):
            aliases[name] = _build_alias(name, used_names)
            used_names.add(aliases[name])
    return aliases


@functools.lru_cache(maxsize=4096)
def _is_writable(format_name: str, name: str) -> bool:
    """Returns whether a format correctly parses a call with this name."""
    tools = named_tool_format(format_name)
    assert tools is not None, "formats come from the table"
    if PLAIN.fullmatch(name) is None:
        return False
    begin, end = tools.written
    arguments = "{}" if "schema" in tools.arguments_form({"type": "object"}) else ""
    text = f"{begin.replace(NAME_HERE, name)}{arguments}{end}"
    reasoning = tools if isinstance(tools, ChannelFormat) else None
    message = read_message(MessageForm(tools, reasoning, {name: {}}), text)
    return [call.name for call in message.calls] == [name] and not message.content


def _build_alias(name: str, used_names: set[str]) -> str:
    """Returns a unique identifier that resembles a name."""
    alias = re.sub(r"\W+", "_", name).strip("_")[:MAX_ALIAS] or "function"
    number = 1
    candidate = alias
    while candidate in used_names:
        number += 1
        candidate = f"{alias[: MAX_ALIAS - 6]}_{number}"
    return candidate
