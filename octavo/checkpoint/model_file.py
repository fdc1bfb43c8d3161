"""The files of a catalogue model, with the wheels that contain them, and the names of split GGUF
files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""File names of split models, as written by llama-gguf-split."""


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file in a wheel on PyPI: `requirement` pins the wheel, `member` is the path inside it."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model, the concatenation of `parts`."""

    name: str
    num_bytes: int
    sha256: str
    parts: tuple[WheelMember, ...]
