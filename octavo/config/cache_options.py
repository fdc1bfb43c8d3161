"""Options of the KV cache, and of blocks that go from one engine to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.option import option


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Options of the KV cache, on the device and off it."""

    kv_cache_memory_bytes: int | None = option(
        None,
        "memory of the KV cache, e.g. 2GiB; default a safe share of what is free",
        unit="bytes",
        low=1,
    )
    gpu_memory_utilization: float = option(
        0.92,
        "share of a GPU's memory taken in all, where kv_cache_memory_bytes is not given",
        low=0,
    )
    kv_cache_dtype: Literal["auto", "fp32", "bf16", "int8", "fp8"] = option(
        "auto",
        "precision of K and V; auto: the compute dtype's (native: bf16 where that is not fp32);"
        " int8, and fp8 (e4m3; torch, reference): a scale for each token and head",
    )
    kv_layout: Literal["paged", "virtual"] = option(
        "paged",
        "where blocks lie: anywhere; or virtual, each request's in a range of addresses of its own,"
        " without sharing (Linux)",
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of prompts that start alike")
    shared_prefix_attention: bool = option(
        True,
        "read blocks that several running requests share once for all of them (native; torch with"
        " triton)",
    )
    kv_spill_dir: str | None = option(
        None,
        "native, with kv_selection: directory, on a disk, of a file for the keys and values of the"
        " layers that choose which of them they read; kv_cache_memory_bytes then holds those that"
        " were read last (InfiniGen); no result changes",
    )
    kv_spill_bytes: int | None = option(
        None,
        "with kv_spill_dir: size of that file, e.g. 20GiB, which bounds the tokens of all requests",
        unit="bytes",
        low=1,
    )
    kv_spill_ahead: bool = option(
        False,
        "with kv_spill_dir: guess, while a layer computes, what the next one chooses, and read it;"
        " no result depends on it",
    )
    swap_space: int = option(
        1 << 30,
        "host memory for KV blocks of preempted requests, e.g. 4GiB, at most the KV cache's size;"
        " default 1GiB",
        unit="bytes",
        low=0,
    )
    kv_offloading_size: int | None = option(
        None,
        "host memory in which the prefix cache keeps blocks that left the device; default none,"
        " with prefix_cache_dir 1GiB",
        unit="bytes",
    )
    prefix_cache_dir: str | None = option(
        None,
        "directory in which the prefix cache outlives the engine; several engines may share it",
    )
    prefix_cache_size: int = option(
        10 << 30, "most bytes in prefix_cache_dir, e.g. 50GiB; default 10GiB", unit="bytes", low=1
    )
    prefix_cache_policy: Literal["lru", "importance"] = option(
        "lru",
        "which blocks of prefix_cache_dir stay in host memory: the last used; or importance"
        " (native, reference): those to which prompts pay most attention, by one layer's keys,"
        " which are kept apart (IMPRESS)",
    )
    prefix_cache_load: float = option(
        1.0,
        "with the policy importance: share of a stored prefix's blocks that a prompt reads from"
        " files, those to which its last tokens pay most attention; below 1 results change",
        low=0,
    )
    kv_pool: str | None = option(
        None,
        "mooncake://HOST:PORT of a Mooncake master, behind which engines share blocks of the prefix"
        " cache; default none",
    )
    kv_pool_lends: int = option(
        0, "memory that this engine lends to the kv_pool; default none", unit="bytes", low=0
    )
    kv_pool_replicas: int = option(
        1, "store nodes of the kv_pool that each block is written to", unit="count", low=1
    )
    kv_events_config: str | None = option(
        None,
        "JSON object of what is published of blocks that the prefix cache gains and loses, in"
        " vLLM's form and with its fields: enable_kv_cache_events, publisher, endpoint,"
        " replay_endpoint, topic, buffer_steps, hwm; and secret",
    )
    media_cache_tokens: int = option(
        8192,
        "rows of encoded images that are kept for images that come again, beside those that a step"
        " reads",
        low=0,
    )
    kv_cache: bool = option(
        True,
        "keep K and V; without, every step computes all of a request's tokens again (for"
        " comparison)",
    )

    @property
    def weighs_prefixes(self) -> bool:
        """Whether stored blocks are weighed by the attention that prompts pay to them."""
        return self.prefix_cache_policy == "importance"

    @property
    def loads_in_part(self) -> bool:
        """Whether prompts may go without a part of their stored prefix."""
        return self.prefix_sparsity > 0

    @property
    def prefix_sparsity(self) -> float:
        """Share of a stored prefix's blocks that a prompt does not load."""
        return 1.0 - self.prefix_cache_load if self.weighs_prefixes else 0.0


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Options of KV blocks that go from one engine to another."""

    kv_transfer: Literal["zmq", "mooncake", "nixl"] | None = option(
        None,
        "how KV blocks go to other engines and come from them: zmq, over TCP; mooncake or nixl,"
        " read out of memory by its transfer engine or over UCX; default not",
    )
    role: Literal["prefill", "decode", "both"] = option(
        "both",
        "with kv_transfer: prefill computes prompts for other engines, decode has long prompts"
        " computed by its prefill_peers",
    )
    kv_transfer_address: str = option(
        "127.0.0.1:8998",
        "HOST:PORT where other engines ask for prompts; their blocks leave by the ports above it,"
        " one of each rank",
    )
    prefill_peer: tuple[str, ...] = option(
        (), "HOST:PORT of an engine that computes prompts for this one; may be given several times"
    )
    kv_transfer_secret: str | None = option(
        None, "secret that these engines share; without one they meet on this machine only"
    )
    kv_transfer_min_tokens: int | None = option(
        None,
        "fewest uncached tokens of a prompt that is computed elsewhere; default the number from"
        " which on computing them here takes longer than their blocks over the link, both as"
        " measured, and 256 until they are",
        unit="count",
        low=1,
    )
    kv_transfer_timeout: float = option(
        30.0, "seconds for which a prompt's blocks are waited for before it is computed here", low=1
    )
    kv_transfer_size: int = option(
        1 << 30, "most bytes of blocks kept for other engines; default 1GiB", unit="bytes", low=1
    )

    @property
    def computes_for_others(self) -> bool:
        """Whether other engines may have their prompts computed here."""
        return self.kv_transfer is not None and self.role != "decode"
