"""Builds the cache tier of blocks that are fetched from other engines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from octavo.api.errors import ConfigError
from octavo.checkpoint.ports import Checkpoint
from octavo.config.engine_config import EngineConfig
from octavo.config.hosts import LOOPBACK, is_local
from octavo.config.paths import open_state_home
from octavo.config.sizes import format_bytes
from octavo.distributed.options import TransferOptions
from octavo.distributed.transfer.address import (
    TransferAddresses,
    check_address,
    check_ports,
    endpoint,
    join_endpoints,
    parse_address,
)
from octavo.distributed.transfer.block_transport import BlockTransport
from octavo.distributed.transfer.kv_head_partition import KVHeadPartition
from octavo.distributed.transfer.report_box import ReportBox, Reports, SentReports
from octavo.distributed.transfer.transfer_worker import TransferWorker
from octavo.engine.kv.kv_connector import SENT_BYTES_PER_STEP, Tiers
from octavo.engine.protocol.kv_messages import TransferFacts
from octavo.engine.protocol.ports import ConnectorWorker
from octavo.executor.kv import BLOCK_SIZE, KvLayout
from octavo.program.ops import original_context
from octavo.program.program import CacheGroup
from octavo.wiring.tier_builder import BuiltTiers, TierBuilder
from octavo.wiring.tiers import count_slots, fingerprint_parts, format_facts, stored_weight_files
from octavo.worker.cache_engine import HostShape
from octavo.worker.kv_connectors.fingerprint import fingerprint
from octavo.worker.loaded_model import LoadedModel, MakeConnector
from octavo.worker.ranks.messages import RankSlots, TellReport
from octavo.worker.ranks.start import SharedSlots


class TransferTierBuilder(TierBuilder):
    def check(
        self, config: EngineConfig, layouts: Sequence[KvLayout], groups: Sequence[CacheGroup]
    ) -> None:
        options, num_ranks = config.of(TransferOptions), config.backend.tensor_parallel_size
        heads = KVHeadPartition.build(layouts, groups, num_ranks=num_ranks)
        block_bytes = sum(heads.block_bytes())
        count_slots(config.cache, block_bytes, has_more=True)
        _check_transport(options)
        _check_addresses(options, num_ranks)
        if options.kv_transfer_size < block_bytes:
            raise ConfigError(
                f"kv_transfer_size: got {format_bytes(options.kv_transfer_size)}, expected at"
                f" least one block, {format_bytes(block_bytes)}"
            )

    def build(
        self, checkpoint: Checkpoint, loaded: LoadedModel, groups: Sequence[CacheGroup]
    ) -> BuiltTiers:
        options = loaded.config.of(TransferOptions)
        num_ranks = loaded.config.backend.tensor_parallel_size
        heads = KVHeadPartition.build(loaded.layouts, groups, 0, num_ranks)
        block_bytes = heads.block_bytes()
        num_slots = count_slots(loaded.config.cache, sum(block_bytes), has_more=True)
        parts = _fingerprint_parts(checkpoint, loaded, heads, groups)
        files = stored_weight_files(checkpoint, loaded)
        slots = RankSlots(num_slots, fingerprint(parts, files, cache=open_state_home()))
        reports = ReportBox(num_ranks)
        worker = _build_worker(loaded, heads, slots, reports)
        tiers = Tiers(
            block_bytes,
            num_slots,
            keeps=options.prefills_for_peers,
            saved_bytes_per_step=SENT_BYTES_PER_STEP,
            # If a lost rank ends a step, the layers that the step counted contain wrong values.
            streams=worker.sends_layers and loaded.writes_layers and num_ranks == 1,
        )
        facts = format_facts(parts, slots.fingerprint)
        facts |= {"transport": str(options.kv_transfer)}
        endpoints = [_rank_endpoint(options, rank) for rank in range(num_ranks)]
        return BuiltTiers(
            tiers,
            worker,
            facts=TransferFacts(
                facts,
                join_endpoints(endpoints) if options.prefills_for_peers else None,
                num_ranks,
                BLOCK_SIZE,
                original_context(loaded.program),
                sum(block_bytes) / BLOCK_SIZE,
            ),
            sharing=None if num_ranks == 1 else SharedSlots(slots, reports.add_rank),
        )

    def build_on_rank(self, groups: Sequence[CacheGroup], rank: int) -> MakeConnector:
        return partial(_build_rank_worker, groups, rank)


def _check_transport(options: TransferOptions) -> None:
    """Raises BackendUnavailable if the library of the transport is not installed."""
    if options.kv_transfer == "mooncake":
        from octavo.distributed.transfer.mooncake_mover import require_mooncake

        require_mooncake()
    if options.kv_transfer == "nixl":
        from octavo.distributed.transfer.nixl_mover import require_nixl

        require_nixl()


def _check_addresses(options: TransferOptions, num_ranks: int) -> None:
    """Checks that the transfer addresses are valid, and reachable from other machines only with a
    secret.
    """
    host, port = parse_address(options.kv_transfer_address, name="kv_transfer_address")
    if options.prefills_for_peers:
        check_ports(port, num_ranks, name="kv_transfer_address")
        check_address(host, options.kv_transfer_secret, name="kv_transfer_address")
    own = (host if not is_local(host) else LOOPBACK[0], port)
    seen = set()
    for address in options.prefill_peer:
        there, port = parse_address(address, name="prefill_peer")
        peer = (there if not is_local(there) else LOOPBACK[0], port)
        if peer == own and options.prefills_for_peers:
            raise ConfigError(
                f"prefill_peer: got {address!r}, which is this engine's own kv_transfer_address",
                hint="set another engine, or change the kv_transfer_address of this one",
            )
        if peer in seen:
            raise ConfigError(f"prefill_peer: got {address!r} twice", hint="list each engine once")
        seen.add(peer)


def _build_rank_worker(
    groups: Sequence[CacheGroup], rank: int, loaded: LoadedModel, slots: RankSlots, tell: TellReport
) -> ConnectorWorker:
    num_ranks = loaded.config.backend.tensor_parallel_size
    heads = KVHeadPartition.build(loaded.layouts, groups, rank, num_ranks)
    return _build_worker(loaded, heads, slots, SentReports(tell))


def _build_worker(
    loaded: LoadedModel, heads: KVHeadPartition, slots: RankSlots, reports: Reports
) -> TransferWorker:
    options = loaded.config.of(TransferOptions)
    own_bytes = [layout.block_bytes for layout in loaded.layouts]
    # All ranks keep the same blocks for other engines, each its own part.
    max_bytes = options.kv_transfer_size * sum(own_bytes) // sum(heads.block_bytes())
    listen = _rank_endpoint(options, heads.rank) if options.prefills_for_peers else None
    addresses = TransferAddresses(
        slots.fingerprint,
        listen,
        options.kv_transfer_secret,
        options.kv_transfer_timeout,
        max_bytes,
    )
    shapes = [HostShape(slots.num_slots, size) for size in own_bytes]
    return TransferWorker(shapes, addresses, _build_transport(options), heads, reports)


def _rank_endpoint(options: TransferOptions, rank: int) -> str:
    """Returns the address from which a rank's part of blocks is fetched."""
    host, port = parse_address(options.kv_transfer_address, name="kv_transfer_address")
    return endpoint(host, port + 1 + rank)


def _fingerprint_parts(
    checkpoint: Checkpoint,
    loaded: LoadedModel,
    heads: KVHeadPartition,
    groups: Sequence[CacheGroup],
) -> dict[str, Any]:
    """Returns everything except the weights that determines a block's bytes, independent of how
    ranks split the heads.
    """
    layouts = [
        [str(group), layout.dtype, own.num_heads, own.rows]
        for group, layout, own in zip(groups, loaded.layouts, heads.groups, strict=True)
    ]
    return fingerprint_parts(checkpoint, loaded) | {"layouts": layouts}


def _build_transport(options: TransferOptions) -> BlockTransport | None:
    """Returns the transport of block data; None if blocks are sent in messages, the only encrypted
    transport.
    """
    host, _ = parse_address(options.kv_transfer_address, name="kv_transfer_address")
    if options.kv_transfer == "nixl":
        from octavo.distributed.transfer.nixl_mover import NixlMover

        return NixlMover()
    if options.kv_transfer == "mooncake":
        from octavo.distributed.transfer.mooncake_mover import MooncakeMover

        return MooncakeMover(host)
    if options.kv_transfer_secret:
        return None
    from octavo.distributed.transfer.socket_mover import SocketMover

    return SocketMover(host if options.prefills_for_peers else None)
