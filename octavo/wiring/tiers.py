"""Builds the lower tiers of the prefix cache: host memory, and files behind it, or the tiers of an
extension.

The scheduler half (`KVConnector`) is built from the returned `Tiers` and decides which blocks are
kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.api.errors import ConfigError
from octavo.checkpoint.ports import Checkpoint
from octavo.config.cache_options import CacheOptions
from octavo.config.config_hooks import get_result_options
from octavo.config.engine_config import EngineConfig
from octavo.config.sizes import format_bytes
from octavo.engine.kv.kv_connector import Tiers
from octavo.executor.kv import BLOCK_SIZE, SPLIT_KEYS, KvLayout
from octavo.program.program import CacheGroup
from octavo.utils.progress import Report
from octavo.utils.version import __version__
from octavo.wiring.model_hooks import block_choice, tier_builder
from octavo.wiring.tier_builder import BuiltTiers
from octavo.worker.cache_engine import HostShape
from octavo.worker.kv_connectors.block_directory import BlockDirectory, check_size, open_root
from octavo.worker.kv_connectors.block_file import VERSION
from octavo.worker.kv_connectors.fingerprint import fingerprint
from octavo.worker.kv_connectors.tiers import TierWorker
from octavo.worker.loaded_model import LoadedModel
from octavo.worker.machine import Machine

MAX_FACT_LENGTH = 64
"""Maximum length of a fact in characters; longer ones are shown as digests."""
DEFAULT_OFFLOADING_BYTES = 1 << 30
"""Default of kv_offloading_size with prefix_cache_dir, in bytes. Memory that is never written costs
nothing.
"""


def build_tiers(
    checkpoint: Checkpoint, loaded: LoadedModel, groups: Sequence[CacheGroup], report: Report
) -> BuiltTiers:
    """Builds the configured tiers; `groups` are the unsharded model's."""
    cache = loaded.config.cache
    if (builder := tier_builder(loaded.config)) is not None:
        return builder.build(checkpoint, loaded, groups)
    block_bytes = [layout.block_bytes for layout in loaded.layouts]
    num_slots = count_slots(cache, sum(block_bytes))
    if not num_slots:
        return BuiltTiers()
    directory: BlockDirectory | None = None
    facts: dict[str, str] = {}
    if cache.prefix_cache_dir is not None:
        directory, facts = _block_directory(checkpoint, loaded, cache.prefix_cache_dir)
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
    return BuiltTiers(tiers, worker, facts)


def check_tiers(
    config: EngineConfig, layouts: Sequence[KvLayout], groups: Sequence[CacheGroup]
) -> None:
    """Raises ConfigError if the tiers do not support blocks of these layouts, one for each cache
    group; `groups` are the unsharded model's.
    """
    if (builder := tier_builder(config)) is not None:
        builder.check(config, layouts, groups)
        return
    cache, block_bytes = config.cache, [layout.block_bytes for layout in layouts]
    count_slots(cache, sum(block_bytes))
    if cache.prefix_cache_dir is not None:
        check_size(cache.prefix_cache_size, block_bytes)
        open_root(cache.prefix_cache_dir)


def count_slots(cache: CacheOptions, block_bytes: int, *, has_more: bool = False) -> int:
    """Returns the number of host memory slots, each for a block of all groups. `has_more`: an
    extension's tier is behind them.
    """
    offload_bytes = cache.kv_offloading_size
    has_more = has_more or cache.prefix_cache_dir is not None
    if offload_bytes is None:
        offload_bytes = max(_default_bytes(), block_bytes) if has_more else 0
    if offload_bytes < block_bytes and (offload_bytes or has_more):
        raise ConfigError(
            f"kv_offloading_size: got {format_bytes(offload_bytes)}, expected at least one block,"
            f" {format_bytes(block_bytes)}",
            hint="raise kv_offloading_size, or set it to 0",
        )
    return offload_bytes // block_bytes


def _default_bytes() -> int:
    """Returns the default host memory: at most an eighth of the free memory."""
    available = Machine().available_bytes()
    if available is None:
        return DEFAULT_OFFLOADING_BYTES
    return min(DEFAULT_OFFLOADING_BYTES, available // 8)


def _block_directory(
    checkpoint: Checkpoint, loaded: LoadedModel, path: str
) -> tuple[BlockDirectory, dict[str, str]]:
    """Opens the directory of this model's blocks, keyed by everything that determines their bytes;
    returns it and these facts.
    """
    root, parts = open_root(path), fingerprint_parts(checkpoint, loaded)
    digest, weights = (
        fingerprint(each, stored_weight_files(checkpoint, loaded), cache=root)
        for each in (parts, {})
    )
    directory = BlockDirectory(root, digest, max_bytes=loaded.config.cache.prefix_cache_size)
    return directory, format_facts(parts, weights)


def format_facts(parts: Mapping[str, Any], weights: bytes) -> dict[str, str]:
    """Formats the parts of a fingerprint for comparison and display, long ones as digests, and a
    digest of the weights.
    """
    facts = {name: _format_fact(value) for name, value in parts.items()}
    return facts | {"weights": weights.hex()}


def _format_fact(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= MAX_FACT_LENGTH else hashlib.sha256(text.encode()).hexdigest()[:16]


def stored_weight_files(checkpoint: Checkpoint, loaded: LoadedModel) -> list[Path]:
    """Returns the files of the weights that determine the bytes of a block: the model's and the
    draft's.
    """
    draft = _get_draft_checkpoint(loaded)
    return [*checkpoint.weight_files, *(() if draft is None else draft.weight_files)]


def _get_draft_checkpoint(loaded: LoadedModel) -> Checkpoint | None:
    return None if loaded.draft is None else loaded.draft.checkpoint


def fingerprint_parts(checkpoint: Checkpoint, loaded: LoadedModel) -> dict[str, Any]:
    """Returns everything except the weights that determines the bytes of a block."""
    options, backend = loaded.config.model, loaded.backend
    draft = _get_draft_checkpoint(loaded)
    return {
        **({} if draft is None else {"draft": draft.config}),
        **get_result_options(loaded.config),
        "octavo": __version__,
        "format": VERSION,
        "config": checkpoint.config,
        "options": [options.dtype, options.quantization],
        "backend": [backend.name, backend.numerics],
        "layouts": list(map(str, loaded.layouts)),
        "block and split": [BLOCK_SIZE, SPLIT_KEYS],
    }
