"""What the first rank of an engine and the others say to each other, each way over one pipe:
msgpack, a message at a time.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.step import StepPlan

# -- to a rank -------------------------------------------------------------------------------------


class Setup(msgspec.Struct, tag=True):
    """The first."""

    build: str
    """module:function of a `process.BuildRank`"""
    options: dict[str, Any]
    rank: int
    num_ranks: int
    port: int
    """At which all meet."""


class Measure(msgspec.Struct, tag=True):
    """All have loaded: how many KV blocks fit?"""


class Allocate(msgspec.Struct, tag=True):
    """Per cache group, on the device and for swapped requests."""

    num_blocks: list[int]
    num_host_blocks: list[int]


class Execute(msgspec.Struct, tag=True):
    plan: StepPlan


class Close(msgspec.Struct, tag=True):
    pass


ToRank = Setup | Measure | Allocate | Execute | Close

# -- from a rank -----------------------------------------------------------------------------------


class Started(msgspec.Struct, tag=True):
    """It has all it needs to meet the others."""


class Loaded(msgspec.Struct, tag=True):
    pass


class Fits(msgspec.Struct, tag=True):
    num_blocks: list[int]


class Ready(msgspec.Struct, tag=True):
    """From here on it takes plans, and answers nothing."""


class Failed(msgspec.Struct, tag=True):
    """It is about to end."""

    kind: str
    """Name of the class in octavo.errors, or of any other exception."""
    message: str
    hint: str | None = None


FromRank = Started | Loaded | Fits | Ready | Failed
