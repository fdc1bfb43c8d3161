"""Options of KV transfer between engines, and of a KV store that engines share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.option import option


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of a shared store of KV blocks."""

    kv_pool: str | None = option(
        None,
        "Distributed",
        "Share prefix cache blocks through this Mooncake master",
        details="mooncake://HOST:PORT.",
        metavar="URL",
    )
    kv_pool_lends: int = option(
        0, "Distributed", "Lend this much memory to the kv_pool", unit="bytes", low=0
    )
    kv_pool_replicas: int = option(
        1, "Distributed", "Write each block to N store nodes of the kv_pool", unit="count", low=1
    )


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Options of KV transfer between engines."""

    kv_transfer: Literal["zmq", "mooncake", "nixl"] | None = option(
        None,
        "Distributed",
        "Exchange KV blocks with other engines",
        details="zmq: over TCP; mooncake, nixl: read out of memory by its transfer engine or over"
        " UCX.",
    )
    role: Literal["prefill", "decode", "both"] = option(
        "both",
        "Distributed",
        "Prefill for other engines, or decode only",
        details="With kv_transfer. prefill computes prompts for other engines; decode sends long"
        " prompts to its prefill peers.",
    )
    kv_transfer_address: str = option(
        "127.0.0.1:8998",
        "Distributed",
        "Answer other engines here",
        details="Blocks leave by the ports above it, one for each rank.",
        metavar="HOST:PORT",
    )
    prefill_peer: tuple[str, ...] = option(
        (), "Distributed", "Send prompts to the engine at this address", metavar="HOST:PORT"
    )
    kv_transfer_secret: str | None = option(
        None,
        "Distributed",
        "Authenticate peer engines by this secret",
        details="Without one, only engines of this machine are peers.",
        secret=True,
    )
    kv_transfer_min_tokens: int | None = option(
        None,
        "Distributed",
        "Send prompts with at least N uncached tokens",
        details="The default is the length from which computing a prompt here takes longer than"
        " moving its blocks over the link, both as measured, and 256 until they are.",
        derived="measured",
        unit="count",
        low=1,
    )
    kv_transfer_timeout: float = option(
        30.0,
        "Distributed",
        "Recompute a prompt whose blocks take N seconds",
        low=1,
    )
    kv_transfer_size: int = option(
        1 << 30, "Distributed", "Keep at most this much for other engines", unit="bytes", low=1
    )

    @property
    def prefills_for_peers(self) -> bool:
        """Whether this engine prefills prompts for other engines."""
        return self.kv_transfer is not None and self.role != "decode"
