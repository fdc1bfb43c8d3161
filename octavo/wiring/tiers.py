"""Builds the lower tiers of the prefix cache: host memory, and behind it files, a Mooncake pool or
other engines.

The scheduler half (`KVConnector`) is built from the returned `Tiers` and decides which blocks are
kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.api.errors import ConfigError
from octavo.checkpoint.ports import Checkpoint
from octavo.config.cache_options import CacheOptions, TransferOptions
from octavo.config.config_hooks import numbers_of
from octavo.config.hosts import LOOPBACK, is_local
from octavo.config.paths import open_state_home
from octavo.config.sizes import format_bytes
from octavo.engine.kv.kv_connector import SENT_BYTES_PER_STEP, Tiers
from octavo.engine.protocol.ports import ConnectorWorker
from octavo.executor.kv import BLOCK_SIZE, SPLIT_KEYS
from octavo.program.ops import original_context
from octavo.program.program import CacheGroup
from octavo.transfer.address import (
    TransferEnds,
    check_address,
    check_ports,
    endpoint,
    join_endpoints,
    parse_address,
)
from octavo.transfer.block_transport import BlockTransport
from octavo.transfer.messages import TransferFacts
from octavo.utils.progress import Report
from octavo.utils.version import __version__
from octavo.wiring.model_hooks import block_choice
from octavo.worker.cache_engine import HostShape
from octavo.worker.kv_connectors.block_directory import BlockDirectory, check_size, open_root
from octavo.worker.kv_connectors.block_file import VERSION
from octavo.worker.kv_connectors.fingerprint import fingerprint
from octavo.worker.kv_connectors.kv_head_partition import KVHeadPartition
from octavo.worker.kv_connectors.report_box import ReportBox, Reports, SentReports
from octavo.worker.kv_connectors.tiers import TierWorker
from octavo.worker.loaded_model import LoadedModel
from octavo.worker.machine import Machine
from octavo.worker.ranks.messages import RankSlots, TellReport
from octavo.worker.ranks.start import SharedSlots

if TYPE_CHECKING:
    from octavo.worker.kv_connectors.transfer import TransferWorker

SHOWN = 64
"""Longer facts are shown as digests."""
DEFAULT_OFFLOADING_BYTES = 1 << 30
"""Default of kv_offloading_size with prefix_cache_dir, in bytes. Memory that is never written costs
nothing.
"""


@dataclass(frozen=True, slots=True)
class BuiltTiers:
    """Lower tiers of the prefix cache; empty if the options disable them."""

    tiers: Tiers | None = None
    """Settings of the scheduler half."""
    worker: ConnectorWorker | None = None
    """Worker half."""
    facts: TransferFacts | None = None
    """Facts that engines compare when they connect; None without KV transfer."""
    sharing: SharedSlots | None = None
    """Lets other ranks take part in the worker half; None if they do not."""


def build_tiers(
    checkpoint: Checkpoint, loaded: LoadedModel, groups: Sequence[CacheGroup], report: Report
) -> BuiltTiers:
    """Builds the configured tiers; `groups` are the unsharded model's."""
    cache = loaded.config.cache
    if loaded.config.transfer.kv_transfer is not None:
        return _other_engines(checkpoint, loaded, groups)
    block_bytes = [layout.block_bytes for layout in loaded.layouts]
    num_slots = _num_slots(cache, sum(block_bytes), has_more=cache.kv_pool is not None)
    if not num_slots:
        return BuiltTiers()
    if cache.kv_pool is not None:
        return _shared_pool(checkpoint, loaded, num_slots)
    directory = None if cache.prefix_cache_dir is None else _block_directory(checkpoint, loaded)
    choice, rater = block_choice(loaded) or (None, None)
    worker = TierWorker([HostShape(num_slots, size) for size in block_bytes], directory, rater)
    first = worker.report(wait_s=0.0)
    if first is not None:
        report(
            f"prefix cache in {cache.prefix_cache_dir}: {len(first.found):,} blocks of this model"
        )
    max_pinned_bytes = cache.prefix_cache_size // 2
    keeps = directory is not None
    tiers = Tiers(
        block_bytes,
        num_slots,
        keeps,
        max_pinned_bytes,
        first=first,
        choice=choice,
    )
    return BuiltTiers(tiers, worker)


def check_tiers(
    cache: CacheOptions, transfer: TransferOptions, block_bytes: Sequence[int], num_ranks: int
) -> None:
    """Raises ConfigError if the tiers do not support blocks of these sizes (one for each cache
    group) or this number of ranks.
    """
    has_more = transfer.kv_transfer is not None or cache.kv_pool is not None
    _num_slots(cache, sum(block_bytes), has_more=has_more)
    if cache.kv_pool is not None:
        from octavo.worker.kv_connectors.mooncake_pool import check_pool

        check_pool(cache.kv_pool)
    if transfer.kv_transfer == "mooncake":
        from octavo.worker.kv_connectors.mooncake_mover import require_mooncake

        require_mooncake()
    if transfer.kv_transfer == "nixl":
        from octavo.worker.kv_connectors.nixl_mover import require_nixl

        require_nixl()
    _check_addresses(transfer, num_ranks)
    if transfer.kv_transfer is not None and transfer.kv_transfer_size < sum(block_bytes):
        raise ConfigError(
            f"kv_transfer_size: got {format_bytes(transfer.kv_transfer_size)}, allowed is at least"
            f" one block, {format_bytes(sum(block_bytes))}"
        )
    if cache.prefix_cache_dir is not None:
        check_size(cache.prefix_cache_size, block_bytes)
        open_root(cache.prefix_cache_dir)


def _check_addresses(transfer: TransferOptions, num_ranks: int) -> None:
    """Checks that the transfer addresses are valid, and reachable from other machines only with a
    secret.
    """
    host, port = parse_address(transfer.kv_transfer_address, name="kv_transfer_address")
    if transfer.computes_for_others:
        check_ports(port, num_ranks, name="kv_transfer_address")
        check_address(host, transfer.kv_transfer_secret, name="kv_transfer_address")
    own = (host if not is_local(host) else LOOPBACK[0], port)
    met = set()
    for address in transfer.prefill_peer:
        there, port = parse_address(address, name="prefill_peer")
        peer = (there if not is_local(there) else LOOPBACK[0], port)
        if peer == own and transfer.computes_for_others:
            raise ConfigError(
                f"prefill_peer: got {address!r}, which is this engine's own kv_transfer_address",
                hint="name another engine, or give this one another kv_transfer_address",
            )
        if peer in met:
            raise ConfigError(f"prefill_peer: got {address!r} twice", hint="name each engine once")
        met.add(peer)


def _num_slots(cache: CacheOptions, block_bytes: int, *, has_more: bool) -> int:
    """Returns the number of host memory slots, each for a block of all groups. `has_more`: other
    engines or a pool are behind it.
    """
    wanted = cache.kv_offloading_size
    has_more = has_more or cache.prefix_cache_dir is not None
    if wanted is None:
        wanted = max(_default_bytes(), block_bytes) if has_more else 0
    if wanted < block_bytes and (wanted or has_more):
        raise ConfigError(
            f"kv_offloading_size: got {format_bytes(wanted)}, allowed is at least one block,"
            f" {format_bytes(block_bytes)}"
        )
    return wanted // block_bytes


def _default_bytes() -> int:
    """Returns the default host memory: at most an eighth of the free memory."""
    available = Machine().available_bytes()
    if available is None:
        return DEFAULT_OFFLOADING_BYTES
    return min(DEFAULT_OFFLOADING_BYTES, available // 8)


def _block_directory(checkpoint: Checkpoint, loaded: LoadedModel) -> BlockDirectory:
    """Opens the directory of this model's blocks, keyed by everything that determines their
    bytes.
    """
    cache = loaded.config.cache
    assert cache.prefix_cache_dir is not None
    root = open_root(cache.prefix_cache_dir)
    return BlockDirectory(
        root,
        fingerprint(_parts(checkpoint, loaded), checkpoint.weight_files, cache=root),
        max_bytes=cache.prefix_cache_size,
    )


def _parts(checkpoint: Checkpoint, loaded: LoadedModel) -> dict[str, Any]:
    """Returns everything except the weights that determines the bytes of a block."""
    options, backend = loaded.config.model, loaded.backend
    return {
        **numbers_of(loaded.config),
        "octavo": __version__,
        "format": VERSION,
        "config": checkpoint.config,
        "options": [options.dtype, options.quantization],
        "backend": [backend.name, backend.numerics],
        "layouts": list(map(str, loaded.layouts)),
        "block and split": [BLOCK_SIZE, SPLIT_KEYS],
    }


def _shared_pool(checkpoint: Checkpoint, loaded: LoadedModel, num_slots: int) -> BuiltTiers:
    """Builds a tier in a Mooncake pool."""
    from octavo.worker.kv_connectors.mooncake_pool import MooncakePool, check_pool
    from octavo.worker.kv_connectors.pool_worker import PoolWorker

    cache = loaded.config.cache
    assert cache.kv_pool is not None
    pool = MooncakePool(
        check_pool(cache.kv_pool),
        lends_bytes=cache.kv_pool_lends,
        num_replicas=cache.kv_pool_replicas,
    )
    block_bytes = [layout.block_bytes for layout in loaded.layouts]
    name = fingerprint(_parts(checkpoint, loaded), checkpoint.weight_files, cache=open_state_home())
    worker = PoolWorker([HostShape(num_slots, size) for size in block_bytes], pool, name)
    # A pin is a wish to evict a block late, which the store may not be able to grant.
    max_pinned_bytes = num_slots * sum(block_bytes)
    tiers = Tiers(block_bytes, num_slots, True, max_pinned_bytes, asks=True)
    return BuiltTiers(tiers, worker)


# -- other engines ---------------------------------------------------------------------------------


def _other_engines(
    checkpoint: Checkpoint, loaded: LoadedModel, groups: Sequence[CacheGroup]
) -> BuiltTiers:
    """Builds a tier for KV transfer with other engines."""
    options, num_ranks = loaded.config.transfer, loaded.config.backend.tensor_parallel_size
    heads = KVHeadPartition.build(loaded.layouts, groups, 0, num_ranks)
    block_bytes = heads.block_bytes()
    num_slots = _num_slots(loaded.config.cache, sum(block_bytes), has_more=True)
    parts = _transfer_parts(checkpoint, loaded, heads, groups)
    slots = RankSlots(
        num_slots, fingerprint(parts, checkpoint.weight_files, cache=open_state_home())
    )
    reports = ReportBox(num_ranks)
    worker = _transfer_worker(loaded, heads, slots, reports)
    tiers = Tiers(
        block_bytes,
        num_slots,
        keeps=options.computes_for_others,
        saved_bytes_per_step=SENT_BYTES_PER_STEP,
        # A step that a lost rank ends has written numbers of no use in the layers that it counted.
        streams=worker.sends_layers and loaded.writes_layers and num_ranks == 1,
    )
    facts = {name: _short(value) for name, value in parts.items()}
    facts |= {"transport": str(options.kv_transfer), "weights": slots.fingerprint.hex()}
    endpoints = [_endpoint_of(options, rank) for rank in range(num_ranks)]
    return BuiltTiers(
        tiers,
        worker,
        TransferFacts(
            facts,
            join_endpoints(endpoints) if options.computes_for_others else None,
            num_ranks,
            BLOCK_SIZE,
            original_context(loaded.program),
            sum(block_bytes) / BLOCK_SIZE,
        ),
        None if num_ranks == 1 else SharedSlots(slots, reports.add_rank),
    )


def rank_connector(
    groups: Sequence[CacheGroup], rank: int, loaded: LoadedModel, slots: RankSlots, tell: TellReport
) -> ConnectorWorker:
    """Builds the worker half of KV transfer for a rank other than 0; `groups` are the unsharded
    model's.
    """
    num_ranks = loaded.config.backend.tensor_parallel_size
    heads = KVHeadPartition.build(loaded.layouts, groups, rank, num_ranks)
    return _transfer_worker(loaded, heads, slots, SentReports(tell))


def _transfer_worker(
    loaded: LoadedModel, heads: KVHeadPartition, slots: RankSlots, reports: Reports
) -> TransferWorker:
    from octavo.worker.kv_connectors.transfer import TransferWorker  # which loads ZeroMQ

    options = loaded.config.transfer
    own_bytes = [layout.block_bytes for layout in loaded.layouts]
    # All ranks keep as many blocks for others, each its part of them.
    max_bytes = options.kv_transfer_size * sum(own_bytes) // sum(heads.block_bytes())
    listen = _endpoint_of(options, heads.rank) if options.computes_for_others else None
    ends = TransferEnds(
        slots.fingerprint,
        listen,
        options.kv_transfer_secret,
        options.kv_transfer_timeout,
        max_bytes,
    )
    shapes = [HostShape(slots.num_slots, size) for size in own_bytes]
    return TransferWorker(shapes, ends, _mover(options), heads, reports)


def _endpoint_of(options: TransferOptions, rank: int) -> str:
    """Returns the address from which a rank's part of blocks is fetched."""
    host, port = parse_address(options.kv_transfer_address, name="kv_transfer_address")
    return endpoint(host, port + 1 + rank)


def _transfer_parts(
    checkpoint: Checkpoint,
    loaded: LoadedModel,
    heads: KVHeadPartition,
    groups: Sequence[CacheGroup],
) -> dict[str, Any]:
    """Returns everything except the weights that determines the bytes of a block, independent of
    how ranks split its heads.
    """
    layouts = [
        [str(group), layout.dtype, own.num_heads, own.rows]
        for group, layout, own in zip(groups, loaded.layouts, heads.groups, strict=True)
    ]
    return _parts(checkpoint, loaded) | {"layouts": layouts}


def _mover(options: TransferOptions) -> BlockTransport | None:
    """Returns the transport of block data; None if messages carry it, which is the only encrypted
    way.
    """
    host, _ = parse_address(options.kv_transfer_address, name="kv_transfer_address")
    if options.kv_transfer == "nixl":
        from octavo.worker.kv_connectors.nixl_mover import NixlMover

        return NixlMover()
    if options.kv_transfer == "mooncake":
        from octavo.worker.kv_connectors.mooncake_mover import MooncakeMover

        return MooncakeMover(host)
    if options.kv_transfer_secret:
        return None
    from octavo.worker.kv_connectors.socket_mover import SocketMover

    return SocketMover(host if options.computes_for_others else None)


def _short(value: Any) -> str:
    """Formats a fact for comparison and display; long ones as digests."""
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= SHOWN else hashlib.sha256(text.encode()).hexdigest()[:16]
