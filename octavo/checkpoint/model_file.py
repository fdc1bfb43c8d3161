"""A catalogue model's files: names, sizes, checksums, and the wheels that hold them."""

from __future__ import annotations

from dataclasses import dataclass


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
