"""Small chat templates that differ in the sequences of roles that they take, as published ones do.

Each writes a message as `[role]text`, so that a test can read the roles from a prompt.
"""

from __future__ import annotations

END = "{% if add_generation_prompt %}[assistant]{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v | tojson }}{% endfor %}"
    "</call>{% endfor %}"
)
TOOLS = (
    "{% if tools %}{% for t in tools %}<tool>{{ t.function.name }}</tool>{% endfor %}{% endif %}"
)
MESSAGE = "[{{ m.role }}]{{ m.content }}" + CALLS

FREE = TOOLS + "{% for m in messages %}" + MESSAGE + "{% endfor %}" + END
"""Takes all roles in any order, as ChatML does."""

FORGETFUL = (
    TOOLS + "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    f"{MESSAGE}{{% endif %}}{{% endfor %}}{END}"
)
"""Leaves out every system message but the first."""

STRICT = (
    TOOLS + "{% set ns = namespace(turn=0) %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must be first') }}{% endif %}"
    "{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}"
    f"{MESSAGE}{{% endfor %}}"
    "{% if ns.turn == 0 %}{{ raise_exception('no user message') }}{% endif %}" + END
)
"""Wants one system message at most, first, and users and assistants in turn, as Mistral's do."""

NO_SYSTEM = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}" + END
)
"""Knows users and assistants alone, in turn, as Gemma's first ones do."""

NULL_CONTENT = (
    "{% for m in messages %}{% if m.tool_calls and m.content is none %}"
    "[{{ m.role }}]{% for c in m.tool_calls %}<call>{{ c.function.name + c.function.arguments }}"
    "</call>{% endfor %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}" + END
)
"""Writes calls only if the content is null, and their arguments only if they are text."""

TEMPLATES = {"free": FREE, "forgetful": FORGETFUL, "strict": STRICT, "no-system": NO_SYSTEM}
