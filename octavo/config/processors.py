"""The option `logits_processors`: which functions requests may name, and where they are found.

Reads texts and imports nothing; the worker loads the functions (`worker/logits_processors.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from octavo.errors import ConfigError


class ProcessorEntry(NamedTuple):
    """A function that changes logits, and the name that requests use for it."""

    name: str
    module: str
    attribute: str


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
    return ProcessorEntry(name or attribute, module, attribute)
