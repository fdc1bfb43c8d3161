"""KV events on the wire, in vLLM's format, and the option kv_events_config with vLLM's fields.

A batch is a msgpack array: time, events, data-parallel rank. An event is a map whose key `type` is
its name, as vllm-router 0.1.17 expects (older versions of vLLM sent arrays). Block hashes are the
last 64 bits of the block digests.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from octavo.api.errors import ConfigError
from octavo.config.hosts import is_local
from octavo.engine.protocol.block_events import BlockEvent, BlocksRemoved, BlocksStored

MEDIUM = "GPU"
"""Medium of blocks on the device, in the vocabulary of consumers."""
HASH_BYTES = 8
MAX_BUFFER_STEPS = 1_000_000
SNAPSHOT = b"snapshot"
"""Request for all blocks that are stored now."""
END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number that marks the end of a replay or a snapshot."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks of a chain that the engine now has."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks that the engine no longer has."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """All blocks of the engine are removed."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of a step."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


def get_hash(digest: bytes) -> int:
    """Returns the block hash in the wire format."""
    return int.from_bytes(digest[-HASH_BYTES:], "big")


def wire_event(event: BlockEvent, root: bytes, block_size: int) -> WireEvent:
    """Returns an event in the wire format. The wire format has no root: the first block of an
    unsalted prompt, whose parent is `root`, has parent None.
    """
    if isinstance(event, BlocksStored):
        return BlockStored(
            [get_hash(digest) for digest in event.digests],
            None if event.parent == root else get_hash(event.parent),
            event.token_ids,
            block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
        )
    if isinstance(event, BlocksRemoved):
        return BlockRemoved([get_hash(digest) for digest in event.digests], MEDIUM)
    return AllBlocksCleared()


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of the option kv_events_config."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    """Endpoint of the events; engine i of several listens i ports above it."""
    replay_endpoint: str | None = None
    """Endpoint from which missed batches, or the complete cache, can be requested; engine i listens
    i ports above it. None: no replay.
    """
    buffer_steps: int = 10_000
    """Number of batches kept for replay."""
    hwm: int = 100_000
    """Maximum number of batches queued for a slow subscriber."""
    topic: str = ""
    secret: str | None = None
    """CURVE secret that subscribers need; required for endpoints beyond this machine."""

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def parse_events_config(text: str | None) -> KVEventsConfig:
    """Parses the option; raises ConfigError if it is invalid."""
    if text is None:
        return KVEventsConfig()
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(
            f"kv_events_config: {error}",
            hint="""pass a JSON object, e.g. '{"enable_kv_cache_events": true}'""",
        ) from None
    for name, low, high in (("buffer_steps", 1, MAX_BUFFER_STEPS), ("hwm", 1, MAX_BUFFER_STEPS)):
        if not low <= getattr(config, name) <= high:
            got = f"kv_events_config: {name}: got {getattr(config, name)}"
            raise ConfigError(f"{got}, expected {low} to {high:,}")
    for name in ("endpoint", "replay_endpoint"):
        if (address := getattr(config, name)) is not None:
            _check_endpoint(f"kv_events_config: {name}", address, config.secret)
    return config


def logged_only(text: str | None) -> str | None:
    """Returns the option with publishing turned off; the same events are still logged. Returns None
    if events are disabled.
    """
    if not parse_events_config(text).enable_kv_cache_events:
        return None
    return '{"enable_kv_cache_events": true, "publisher": "null"}'


def offset_endpoint(address: str, engine: int) -> str:
    """Returns the endpoint of one of several engines: the first engine's port plus the engine's
    index.
    """
    if address.startswith("ipc://"):
        return f"{address}_dp{engine}" if engine else address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + engine}"


def _check_endpoint(name: str, address: str, secret: str | None) -> None:
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        return
    match = re.fullmatch(r"tcp://(?P<host>[^:/\s]+|\[[^\]\s]+\]):(?P<port>\d{1,5})", address)
    if match is None or not 0 < int(match["port"]) < 65536 - 64:
        raise ConfigError(
            f"{name}: got {address!r}, expected tcp://HOST:PORT or ipc://PATH",
            hint="for example tcp://127.0.0.1:5557",
        )
    if not is_local(match["host"]) and not secret:
        raise ConfigError(
            f"{name}: got the host {match['host']!r}, which other machines can reach, without"
            f" secret",
            hint="listen on 127.0.0.1, or set secret: events contain the tokens of all prompts",
        )
