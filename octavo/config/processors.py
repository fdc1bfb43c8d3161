"""Parses the option `logits_processors`. The worker loads the functions
(`worker/sampling/logits_processors.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from octavo.api.errors import ConfigError

MAKER = re.compile(r"(?P<attribute>[\w.]+)\((?P<numbers>(-?\d+(,-?\d+)*)?)\)")
"""A factory of a processor and its integer arguments."""


class ProcessorEntry(NamedTuple):
    """A logits processor and the name that requests use for it."""

    name: str
    module: str
    attribute: str
    numbers: tuple[int, ...] | None = None
    """Arguments of the factory; None if `attribute` is the processor itself."""


def processor_entries(texts: Iterable[str]) -> list[ProcessorEntry]:
    """Parses NAME=MODULE:FUNCTION or MODULE:FUNCTION (named like the function). Raises ConfigError
    for an invalid text or a duplicate name.
    """
    entries: dict[str, ProcessorEntry] = {}
    for text in texts:
        entry = _entry(text)
        if entry.name in entries:
            raise ConfigError(
                f"logits_processors: got {entry.name!r} twice, expected one function per name",
                hint="rename one with NAME=MODULE:FUNCTION",
            )
        entries[entry.name] = entry
    return list(entries.values())


def _entry(text: str) -> ProcessorEntry:
    name, _, location = text.rpartition("=")
    module, _, attribute = location.partition(":")
    if not (module and attribute) or ("=" in text and not name):
        raise ConfigError(
            f"logits_processors: got {text!r}, expected NAME=MODULE:FUNCTION or MODULE:FUNCTION"
        )
    match = MAKER.fullmatch(attribute)
    if match is None:
        return ProcessorEntry(name or attribute, module, attribute)
    numbers = tuple(int(number) for number in match["numbers"].split(",") if number)
    return ProcessorEntry(name or match["attribute"], module, match["attribute"], numbers)
