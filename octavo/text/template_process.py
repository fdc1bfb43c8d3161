"""Renders a request's own template in a separate process.

`template_bounds.py` counts steps but not the memory of a single filter call, so the operating
system limits memory and time of untrusted templates.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.api.errors import InvalidRequest
from octavo.text.chat_template import ChatTemplate
from octavo.text.template_bounds import MAX_SECONDS
from octavo.utils.child_process import start_python

MAX_BYTES = 512 << 20
"""Memory limit of a rendering process in bytes."""
PATIENCE_S = 3 * MAX_SECONDS
"""Timeout of a rendering on an overloaded machine, in seconds."""


class RenderingJob(msgspec.Struct):
    source: str
    special_tokens: Mapping[str, str]
    messages: Sequence[Any]
    add_generation_prompt: bool
    variables: Mapping[str, Any]


class Rendered(msgspec.Struct):
    """Result of a rendering: a text or an error."""

    text: str = ""
    error: str | None = None
    hint: str | None = None


def render_apart(
    template: ChatTemplate,
    messages: Sequence[Any],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """Renders like `ChatTemplate.render`, with the same errors."""
    asked = RenderingJob(
        template.source or "", template.special_tokens, messages, add_generation_prompt, variables
    )
    rendered = _compute(msgspec.json.encode(asked))
    if rendered.error is not None:
        raise InvalidRequest(rendered.error, hint=rendered.hint, param="messages")
    return rendered.text


def _compute(asked: bytes) -> Rendered:
    child = start_python(
        ["-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        answer, _ = child.communicate(asked, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return _failure(f"it takes more than {PATIENCE_S:g} seconds")
    if child.returncode != 0:
        return _failure(f"it takes more than {MAX_SECONDS:g} seconds, or {MAX_BYTES >> 20} MiB")
    return msgspec.json.decode(answer, type=Rendered)


def _failure(reason: str) -> Rendered:
    return Rendered(error=f"messages: the chat template failed: {reason}")


def main() -> None:
    """Renders the job on standard input within the process limits."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=RenderingJob)
    seconds = int(MAX_SECONDS) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    template = ChatTemplate(asked.source, asked.special_tokens)
    try:
        text = template.render(asked.messages, asked.add_generation_prompt, asked.variables)
        rendered = Rendered(text)
    except InvalidRequest as error:
        rendered = Rendered(error=error.message, hint=error.hint)
        if isinstance(error.__cause__, MemoryError):
            rendered = _failure(f"it takes more than {MAX_BYTES >> 20} MiB")
    sys.stdout.buffer.write(msgspec.json.encode(rendered))


if __name__ == "__main__":
    main()
