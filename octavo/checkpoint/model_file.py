"""A catalogue model's files: names, sizes, checksums, and the wheels that hold them; and the names
of the files of a split GGUF model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Names of the files of a model in several, as llama-gguf-split gives them."""


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a package on PyPI: `requirement` names the exact wheel, `member` the path in
    it.
    """

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model, made of parts that follow one another."""

    name: str
    num_bytes: int
    sha256: str
    parts: tuple[WheelMember, ...]
