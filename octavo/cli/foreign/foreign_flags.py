"""Rows that map flags of other engines to Octavo's.

A row renames a flag (and converts its value), ignores it with a reason, or rejects it with the
equivalent option. Rows are in `llama_flags.py` and `vllm_flags.py`; `translate_flags.py` applies
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Takes = Literal["nothing", "value", "perhaps"]
"""Whether a value follows the flag; "perhaps": a following word is its value only if it is on, off
or auto.
"""
MODEL = "MODEL"
"""Target of flags that name the model: --model, or the command's argument."""

PROMPT = "PROMPT"
"""Target of flags that give a prompt: the command's argument."""


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A mapping of flags of another engine."""

    names: tuple[str, ...]
    engine: str
    takes: Takes
    text: str
    """Reason to ignore or reject the flag, or a note on a renamed one."""
    target: str | None = None
    """Flag that replaces it."""
    convert: Callable[[str], str | None] | None = None
    """Converts the value. If it returns None, the flag is dropped with the note `text`; if it
    raises ValueError, the flag is rejected.
    """
    extra: tuple[str, ...] = ()
    """Additional flags."""
    is_refused: bool = False
    is_sampling: bool = False
    """Whether the target is a sampling parameter; for a server the flag sets its default."""


LLAMA, VLLM, OLLAMA = "llama.cpp", "vLLM", "Ollama"


def positive(text: str) -> str | None:
    """Drops 0 and -1, which select the default in llama.cpp."""
    return None if text in ("0", "-1", "auto", "default", "") else text


def device_name(text: str) -> str | None:
    name = re.sub(r"\d+$", "", text.lower())
    return {"none": "cpu", "auto": None, "gpu": "cuda"}.get(name, name)


def one_origin(text: str) -> str | None:
    """Parses a list of a single origin, in JSON or separated by commas."""
    origins = json.loads(text) if text.startswith("[") else text.split(",")
    if not isinstance(origins, list) or len(origins) != 1:
        raise ValueError("give --allow-origin once for each origin")
    return str(origins[0])


def rename(
    engine: str,
    names: str,
    target: str,
    convert: Callable[[str], str | None] | None = None,
    *,
    text: str = "Octavo decides this itself",
    extra: tuple[str, ...] = (),
) -> ForeignFlag:
    return ForeignFlag(
        tuple(names.split()),
        engine,
        "value",
        text,
        target=target,
        convert=convert,
        extra=extra,
    )


def sampling(
    names: str, field: str, convert: Callable[[str], str | None] | None = None
) -> ForeignFlag:
    text, target = "this is the default", f"--{field.replace('_', '-')}"
    return ForeignFlag(
        tuple(names.split()),
        LLAMA,
        "value",
        text,
        target=target,
        convert=convert,
        is_sampling=True,
    )


def switch(engine: str, names: str, *flags: str) -> ForeignFlag:
    return ForeignFlag(tuple(names.split()), engine, "nothing", "", extra=flags)


def ignore(engine: str, takes: Takes, names: str, text: str) -> ForeignFlag:
    return ForeignFlag(tuple(names.split()), engine, takes, text)


def refuse(engine: str, takes: Takes, names: str, text: str) -> ForeignFlag:
    return ForeignFlag(tuple(names.split()), engine, takes, text, is_refused=True)
