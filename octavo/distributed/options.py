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
        "KV transfer",
        "Share prefix cache blocks through this Mooncake master",
        details="Format: mooncake://HOST:PORT.",
        metavar="URL",
    )
    kv_pool_lends: int = option(
        0, "KV transfer", "Contribute this much memory to the kv_pool", unit="bytes", low=0
    )
    kv_pool_replicas: int = option(
        1, "KV transfer", "Write each block to N store nodes of the kv_pool", unit="count", low=1
    )


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Options of KV transfer between engines."""

    kv_transfer: Literal["zmq", "mooncake", "nixl"] | None = option(
        None,
        "KV transfer",
        "Exchange KV blocks with other engines",
        details="zmq: over TCP; mooncake: by Mooncake's transfer engine; nixl: over UCX.",
    )
    role: Literal["prefill", "decode", "both"] = option(
        "both",
        "KV transfer",
        "Set the role in prefill-decode disaggregation",
        details="Requires kv_transfer. prefill: prefill prompts for other engines; decode: send"
        " long prompts to prefill_peer.",
    )
    kv_transfer_address: str = option(
        "127.0.0.1:8998",
        "KV transfer",
        "Serve KV blocks on this address",
        details="Blocks are sent from the ports above it, one per rank.",
        metavar="HOST:PORT",
    )
    prefill_peer: tuple[str, ...] = option(
        (), "KV transfer", "Prefill on the engine at this address", metavar="HOST:PORT"
    )
    kv_transfer_secret: str | None = option(
        None,
        "KV transfer",
        "Authenticate peer engines with this secret",
        details="Without a secret, only engines on this machine can connect.",
        secret=True,
    )
    kv_transfer_min_tokens: int | None = option(
        None,
        "KV transfer",
        "Prefill prompts of N uncached tokens remotely",
        details="The default is the measured length from which a local prefill takes longer than"
        " the transfer of its KV blocks; 256 until measured.",
        derived="measured",
        unit="count",
        low=1,
    )
    kv_transfer_timeout: float = option(
        30.0,
        "KV transfer",
        "Recompute if KV blocks take longer than N seconds",
        low=1,
    )
    kv_transfer_size: int = option(
        1 << 30, "KV transfer", "Limit the send buffer for other engines", unit="bytes", low=1
    )

    @property
    def prefills_for_peers(self) -> bool:
        """Whether this engine prefills prompts for other engines."""
        return self.kv_transfer is not None and self.role != "decode"
