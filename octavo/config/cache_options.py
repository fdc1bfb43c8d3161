"""Options of the KV cache and of KV transfer between engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.option import option


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Options of the KV cache, in device memory and in lower tiers."""

    kv_cache_memory_bytes: int | None = option(
        None,
        "Memory and KV cache",
        "Give the KV cache this much memory",
        details="e.g. 2GiB.",
        derived="by free memory",
        common=True,
        unit="bytes",
        low=1,
    )
    gpu_memory_utilization: float = option(
        0.92,
        "Memory and KV cache",
        "Use this fraction of a GPU's memory in all",
        details="Ignored if kv_cache_memory_bytes is given.",
        low=0,
    )
    kv_cache_dtype: Literal["auto", "fp32", "bf16", "int8", "fp8"] = option(
        "auto",
        "Memory and KV cache",
        "Store K and V in this precision",
        details="auto is the compute dtype's (native: bf16 unless that is fp32). int8, and fp8"
        " (e4m3; torch, reference), have a scale per token and head.",
    )
    kv_layout: Literal["paged", "virtual"] = option(
        "paged",
        "Experimental",
        "Give each request a virtual range",
        details="virtual: its blocks lie in one range of addresses, with memory on demand."
        " Requests share no blocks; needs Linux.",
    )
    enable_prefix_caching: bool = option(
        True, "Memory and KV cache", "Reuse the KV blocks of shared prompt prefixes"
    )
    shared_prefix_attention: bool = option(
        True,
        "Memory and KV cache",
        "Read KV blocks shared by running requests once",
        details="Native; torch with triton.",
    )
    swap_space: int = option(
        1 << 30,
        "Memory and KV cache",
        "Reserve host memory for preempted requests",
        details="At most the size of the KV cache.",
        unit="bytes",
        low=0,
    )
    kv_offloading_size: int | None = option(
        None,
        "Memory and KV cache",
        "Keep evicted prefix cache blocks in host memory",
        details="The default is none, and 1GiB with prefix_cache_dir.",
        unit="bytes",
    )
    prefix_cache_dir: str | None = option(
        None,
        "Memory and KV cache",
        "Keep the prefix cache in files here across restarts",
        details="Several engines may share the directory.",
    )
    prefix_cache_size: int = option(
        10 << 30,
        "Memory and KV cache",
        "Limit the files in prefix_cache_dir",
        unit="bytes",
        low=1,
    )
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
    kv_events_config: str | None = option(
        None,
        "Distributed",
        "Publish KV cache events, configured by a JSON object",
        details="The fields are vLLM's: enable_kv_cache_events, publisher, endpoint,"
        " replay_endpoint, topic, buffer_steps, hwm; and secret.",
        metavar="JSON",
    )
    media_cache_tokens: int = option(
        8192, "Multimodal", "Cache encoded images, up to N rows, for repeated images", low=0
    )
    kv_cache: bool = option(
        True,
        "Memory and KV cache",
        "Keep K and V instead of recomputing every token",
        details="--no-kv-cache recomputes all of a request's tokens at each step, for comparison.",
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
    def computes_for_others(self) -> bool:
        """Whether this engine prefills prompts for other engines."""
        return self.kv_transfer is not None and self.role != "decode"
