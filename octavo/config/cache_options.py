"""Options of the KV cache."""

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
        "Set the size of the KV cache",
        details="For example 2GiB.",
        derived="from free memory",
        common=True,
        unit="bytes",
        low=1,
    )
    gpu_memory_utilization: float = option(
        0.92,
        "Memory and KV cache",
        "Use at most this fraction of GPU memory",
        details="Ignored if kv_cache_memory_bytes is set.",
        low=0,
    )
    kv_cache_dtype: Literal["auto", "fp32", "bf16", "int8", "k8v4", "int4", "fp8"] = option(
        "auto",
        "Memory and KV cache",
        "Set the precision of the KV cache",
        details="auto: the compute dtype (native: bf16 unless it is fp32). int8 and fp8 (e4m3;"
        " torch and reference) have one scale per token and head. k8v4 (int8 keys, 4-bit values)"
        " and int4 (native and reference) rotate vectors first.",
    )
    kv_layout: Literal["paged", "virtual"] = option(
        "paged",
        "Experimental",
        "Choose paged or virtual KV memory",
        details="virtual: each request has one contiguous address range, with memory allocated on"
        " demand. Blocks are not shared; requires Linux.",
    )
    enable_prefix_caching: bool = option(
        True, "Memory and KV cache", "Reuse the KV blocks of shared prompt prefixes"
    )
    shared_prefix_attention: bool = option(
        True,
        "Memory and KV cache",
        "Read shared KV blocks once per step",
        details="Supported by native, and by torch with triton.",
    )
    swap_space: int = option(
        1 << 30,
        "Memory and KV cache",
        "Reserve host memory for preempted requests",
        details="Limited to the size of the KV cache.",
        unit="bytes",
        low=0,
    )
    kv_offloading_size: int | None = option(
        None,
        "Memory and KV cache",
        "Keep evicted prefix cache blocks in host memory",
        details="The default is 0, or 1GiB with prefix_cache_dir.",
        unit="bytes",
    )
    prefix_cache_dir: str | None = option(
        None,
        "Memory and KV cache",
        "Persist the prefix cache in this directory",
        details="Several engines may share the directory.",
    )
    prefix_cache_size: int = option(
        10 << 30,
        "Memory and KV cache",
        "Limit the size of prefix_cache_dir",
        unit="bytes",
        low=1,
    )
    kv_events_config: str | None = option(
        None,
        "KV transfer",
        "Publish KV cache events (JSON object)",
        details="Same fields as in vLLM: enable_kv_cache_events, publisher, endpoint,"
        " replay_endpoint, topic, buffer_steps, hwm; and secret.",
        metavar="JSON",
    )
    media_cache_tokens: int = option(
        8192, "Multimodal", "Cache up to N tokens of encoded images", low=0
    )
    kv_cache: bool = option(
        True,
        "Memory and KV cache",
        "Use a KV cache",
        details="--no-kv-cache recomputes every token at each step (for comparison).",
    )
