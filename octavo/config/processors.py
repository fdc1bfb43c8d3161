"""The option `logits_processors`: which functions requests may name, and where they are found.

Reads texts and imports nothing; the worker loads the functions
(`worker/sampling/logits_processors.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from octavo.api.errors import ConfigError

MAKER = re.compile(r"(?P<attribute>[\w.]+)\((?P<numbers>(-?\d+(,-?\d+)*)?)\)")
"""A class or function that makes a processor, and the whole numbers that it is given."""


class ProcessorEntry(NamedTuple):
    """A function that changes logits, and the name that requests use for it."""

    name: str
    module: str
    attribute: str
    numbers: tuple[int, ...] | None = None
    """Numbers with which what is found makes the function; None where it is the function."""


def processor_entries(texts: Iterable[str]) -> list[ProcessorEntry]:
    """Reads NAME=MODULE:FUNCTION, or MODULE:FUNCTION, which has the function's name; ConfigError
    where a text is neither, or a name comes twice.
    """
    found: dict[str, ProcessorEntry] = {}
    for text in texts:
        entry = _entry(text)
        if entry.name in found:
            raise ConfigError(
                f"logits_processors: got {entry.name!r} twice, allowed is one function of a name",
                hint="give one of them another name: NAME=MODULE:FUNCTION",
            )
        found[entry.name] = entry
    return list(found.values())


def _entry(text: str) -> ProcessorEntry:
    name, _, place = text.rpartition("=")
    module, _, attribute = place.partition(":")
    if not (module and attribute) or ("=" in text and not name):
        raise ConfigError(
            f"logits_processors: got {text!r}, allowed is NAME=MODULE:FUNCTION or MODULE:FUNCTION"
        )
    made = MAKER.fullmatch(attribute)
    if made is None:
        return ProcessorEntry(name or attribute, module, attribute)
    numbers = tuple(int(number) for number in made["numbers"].split(",") if number)
    return ProcessorEntry(name or made["attribute"], module, made["attribute"], numbers)
