"""What a flag of another engine is in Octavo: the form of a row, and what makes rows.

A row renames a flag (with its value converted), ignores it for a reason, or refuses it with the
option that does the same. The rows are in `llama_flags.py` and `vllm_flags.py`;
`translate_flags.py` applies them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Takes = Literal["nothing", "value", "perhaps"]
"""Whether a value follows the flag; "perhaps" takes one that is on, off or auto."""
MODEL = "MODEL"
"""Target of flags that name the model: --model, or the argument of a command without it."""

PROMPT = "PROMPT"
"""Target of flags that give a prompt: the argument of a command that takes one."""


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """What some flags of other engines are in Octavo."""

    names: tuple[str, ...]
    engine: str
    takes: Takes
    text: str
    """Why the flag is ignored or refused, or a note on a renamed one."""
    target: str | None = None
    """Flag that takes the place of it."""
    convert: Callable[[str], str | None] | None = None
    """Makes the target's value; None drops the flag with `text`, ValueError refuses it."""
    extra: tuple[str, ...] = ()
    """Flags that are given too."""
    is_refused: bool = False
    is_sampling: bool = False
    """Whether the target is a sampling value, which a server takes as a default."""


LLAMA, VLLM, OLLAMA = "llama.cpp", "vLLM", "Ollama"


def positive(text: str) -> str | None:
    """Drops the 0 or -1 by which llama.cpp leaves a number to itself."""
    return None if text in ("0", "-1", "auto", "default", "") else text


def device_name(text: str) -> str | None:
    name = re.sub(r"\d+$", "", text.lower())
    return {"none": "cpu", "auto": None, "gpu": "cuda"}.get(name, name)


def one_origin(text: str) -> str | None:
    """Returns one origin of a list in JSON or with commas."""
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
