"""Parser of gpt-oss messages: each has a header with a channel and an optional recipient, and a
text.

The analysis channel is reasoning, messages to a function are call arguments, others are content.
Source: OpenAI's description of the harmony response format.
"""

from __future__ import annotations

import re

from octavo.text.parsers.calls import CallWriter
from octavo.text.parsers.parts import PartKind, PartList
from octavo.text.parsers.source import Emit, MalformedText, Steps, TextSource

OPENINGS = ("<|start|>", "<|channel|>")
ENDINGS = ("<|end|>", "<|call|>", "<|return|>")
MESSAGE = "<|message|>"
RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
ANALYSIS = re.compile(r"(?:<\|channel\|>|^)\s*analysis")


def read_channels(source: TextSource, parts: PartList) -> Steps[None]:
    """Reads an output message by message; text outside of messages is content."""
    num_thoughts = 0
    while (yield from source.until(OPENINGS, _make_emit(parts, PartKind.CONTENT))):
        header: list[str] = []
        if not (yield from source.until([MESSAGE], header.append)):
            return
        text = "".join(header)
        recipient = RECIPIENT.search(text)
        if recipient is not None:
            yield from _call(source, CallWriter(parts), recipient[1])
        elif ANALYSIS.search(text) or "to=" in text:
            think = _make_emit(parts, PartKind.REASONING)
            if num_thoughts:
                think("\n")
            num_thoughts += 1
            yield from source.until(ENDINGS, think, keeps_end=False)
        else:
            yield from source.until(ENDINGS, _make_emit(parts, PartKind.CONTENT))


def _make_emit(parts: PartList, kind: PartKind) -> Emit:
    return lambda text: parts.add_text(kind, text)


def _call(source: TextSource, call: CallWriter, name: str) -> Steps[None]:
    try:
        call.begin(name)
    except MalformedText:
        return
    if (yield from source.until(ENDINGS, call.add_arguments, keeps_end=False)):
        call.end()
