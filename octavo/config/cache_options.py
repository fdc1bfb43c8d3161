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
