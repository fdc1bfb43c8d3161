"""Divides memory among the KV caches of several engines, before any of them is loaded.

Uses the capacities computed from model headers (`plan.py`). Each model gets the KV of one request
of maximum length; the rest is divided in proportion to the weights' bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from octavo.api.errors import InsufficientMemory
from octavo.config.sizes import format_bytes
from octavo.worker.capacity import Capacity
from octavo.worker.memory import SAFE_SHARE, plan_kv

PLENTY_BYTES = 1 << 50
"""Memory in bytes with which no KV cache is limited."""


@dataclass(slots=True)
class KvShare:
    """KV cache bytes of one engine during the division."""

    weight_bytes: int
    num_bytes: int
    """Bytes allocated so far, starting at the minimum."""
    most_bytes: int


def share_memory(capacities: Mapping[str, Capacity], memory_bytes: int) -> dict[str, int]:
    """Returns the KV cache bytes of each engine.

    Engines with kv_cache_memory_bytes get exactly this size. Raises InsufficientMemory if the
    models do not fit together.
    """
    fixed = sum(capacity.fixed_bytes for capacity in capacities.values())
    own = sum(capacity.wanted_kv_bytes or 0 for capacity in capacities.values())
    remaining_bytes = memory_bytes - fixed - own
    shares = {
        name: _make_share(capacity)
        for name, capacity in capacities.items()
        if capacity.wanted_kv_bytes is None
    }
    rest = int(remaining_bytes * SAFE_SHARE) - sum(share.num_bytes for share in shares.values())
    if remaining_bytes < 0 or (shares and rest < 0):
        raise _make_error(capacities, memory_bytes)
    _fill(list(shares.values()), rest)
    return {
        name: shares[name].num_bytes if name in shares else capacity.kv_bytes
        for name, capacity in capacities.items()
    }


def describe_shares(capacities: Mapping[str, Capacity], kv_bytes: Mapping[str, int]) -> str:
    """Describes the memory of each engine in one line."""
    return "; ".join(
        f"{name}: weights {format_bytes(capacity.weight_bytes)}, KV cache"
        f" {format_bytes(kv_bytes[name])}"
        for name, capacity in capacities.items()
    )


def _make_share(capacity: Capacity) -> KvShare:
    max_plan = plan_kv(
        capacity.groups, capacity.demand, wanted_bytes=None, available_bytes=PLENTY_BYTES, share=1.0
    )
    return KvShare(capacity.weight_bytes, capacity.least_kv_bytes, max_plan.num_bytes)


def _fill(shares: list[KvShare], rest: int) -> None:
    """Divides the rest in proportion to weight bytes. Bytes beyond an engine's maximum are divided
    among the others.
    """
    while shares and rest > 0:
        total = sum(share.weight_bytes for share in shares)
        granted = {id(share): rest * share.weight_bytes // total for share in shares}
        full = [
            share for share in shares if share.num_bytes + granted[id(share)] >= share.most_bytes
        ]
        for share in full:
            rest -= max(0, share.most_bytes - share.num_bytes)
            share.num_bytes = max(share.num_bytes, share.most_bytes)
        if not full:
            for share in shares:
                share.num_bytes += granted[id(share)]
            return
        shares = [share for share in shares if share not in full]


def _make_error(capacities: Mapping[str, Capacity], memory_bytes: int) -> InsufficientMemory:
    def parts() -> Iterator[str]:
        for name, capacity in capacities.items():
            min_total = format_bytes(capacity.fixed_bytes + capacity.least_kv_bytes)
            yield f"{name} {min_total} with weights {format_bytes(capacity.weight_bytes)}"

    what = "do not fit in memory together" if len(capacities) > 1 else "does not fit"
    return InsufficientMemory(
        f"{', '.join(capacities)} {what}: requires {', '.join(parts())};"
        f" {format_bytes(memory_bytes)} are free. KV caches can use {SAFE_SHARE:.0%} of the"
        " memory that the weights leave",
        hint="serve fewer models, lower max_model_len, or set kv_cache_memory_bytes for each",
    )
