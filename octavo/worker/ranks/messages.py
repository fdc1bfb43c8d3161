"""Messages between the first rank of an engine and the others: msgpack, over one pipe each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from octavo.engine.protocol.kv_messages import ConnectorReport
from octavo.engine.protocol.step import StepPlan
from octavo.utils.child_process import ChildFailed

# -- to a rank -------------------------------------------------------------------------------------


class RankSetup(msgspec.Struct, tag=True):
    """First message: load this rank's part of the model."""

    build: str
    """Name of a `process.BuildRank` as "module:function"."""
    options: dict[str, Any]
    """Engine options by name."""
    rank: int
    num_ranks: int
    address: list[int]
    """Arguments with which this rank joins the `RankRendezvous`."""


class Measure(msgspec.Struct, tag=True):
    """All ranks have loaded: report the number of KV blocks that fit."""


class RankSlots(msgspec.Struct):
    """Properties of a connector to other engines that all ranks have in common."""

    num_slots: int
    """Number of slots in each cache group."""
    fingerprint: bytes
    """Digest of everything that a block's bytes depend on."""


class Allocate(msgspec.Struct, tag=True):
    """Allocate the KV cache; block counts are per cache group."""

    num_blocks: list[int]
    num_host_blocks: list[int]
    """Blocks in host memory, for swapped requests."""
    slots: RankSlots | None = None
    """Slots of the connector to other engines; None without one."""


class Execute(msgspec.Struct, tag=True):
    """Compute a step."""

    plan: StepPlan


class SampledTokens(msgspec.Struct):
    """Tokens that a step sampled for a request, from index `start` on."""

    request_id: str
    start: int
    token_ids: list[int]


class AppendTokens(msgspec.Struct, tag=True):
    """Append tokens that another rank has sampled; sent before the steps that compute them."""

    sampled: list[SampledTokens]


class CloseRank(msgspec.Struct, tag=True):
    pass


ToRank = RankSetup | Measure | Allocate | Execute | AppendTokens | CloseRank

# -- from a rank -----------------------------------------------------------------------------------


class RankStarted(msgspec.Struct, tag=True):
    """The rank is ready to join the others."""


class RankLoaded(msgspec.Struct, tag=True):
    """The rank has loaded its part of the model."""


class FittingBlocks(msgspec.Struct, tag=True):
    """KV blocks that fit on this rank, per cache group."""

    num_blocks: list[int]


class RankReady(msgspec.Struct, tag=True):
    """The rank accepts plans, and sends no more replies."""


class RankReport(msgspec.Struct, tag=True):
    """Outcome of the rank's part of block transfers; sent at any time."""

    report: ConnectorReport


TellReport: TypeAlias = Callable[[ConnectorReport], None]
"""Receives a report of a rank, in any thread."""

FromRank = RankStarted | RankLoaded | FittingBlocks | RankReady | RankReport | ChildFailed
