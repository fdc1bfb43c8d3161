"""Builds the prefix cache off the device: slots in host memory, and files that outlive the engine.

Knows the options and the sizes of blocks; which blocks are kept, and when, is decided by the
scheduler half (`TierConnector`) that the engine makes of the `Tiers` returned here.
"""

from __future__ import annotations

from octavo.backends.kv import BLOCK_SIZE, SPLIT_KEYS
from octavo.config.engine_config import CacheOptions
from octavo.config.sizes import format_bytes
from octavo.engine.kv.tier_connector import Tiers
from octavo.errors import ConfigError
from octavo.ports import Checkpoint
from octavo.progress import Report
from octavo.version import __version__
from octavo.worker.cache_engine import HostShape
from octavo.worker.connectors.block_directory import BlockDirectory, check_size, open_root
from octavo.worker.connectors.block_file import VERSION
from octavo.worker.connectors.fingerprint import fingerprint
from octavo.worker.connectors.tiers import TierWorker
from octavo.worker.loaded_model import LoadedModel
from octavo.worker.machine import Machine

DEFAULT_OFFLOADING_BYTES = 1 << 30
"""Host memory between the device and a prefix_cache_dir where the options name none, in bytes;
memory that is never written costs nothing.
"""


def build_tiers(
    checkpoint: Checkpoint, loaded: LoadedModel, report: Report
) -> tuple[Tiers | None, TierWorker | None]:
    """Returns what the scheduler half is made of, and the worker half; two None where the options
    ask for no prefix cache off the device.
    """
    cache = loaded.config.cache
    block_bytes = [layout.block_bytes for layout in loaded.layouts]
    num_slots = _num_slots(cache, sum(block_bytes))
    if not num_slots:
        return None, None
    directory = None if cache.prefix_cache_dir is None else _block_directory(checkpoint, loaded)
    worker = TierWorker([HostShape(num_slots, size) for size in block_bytes], directory)
    first = worker.report(wait_s=0.0)
    if first is not None:
        report(
            f"prefix cache in {cache.prefix_cache_dir}: {len(first.found):,} blocks of this model"
        )
    max_pinned_bytes = cache.prefix_cache_size // 2
    return Tiers(block_bytes, num_slots, directory is not None, max_pinned_bytes, first), worker


def check_tiers(cache: CacheOptions, block_bytes: list[int]) -> None:
    """Raises ConfigError where blocks of these sizes, one for each cache group, cannot be kept as
    the options say.
    """
    _num_slots(cache, sum(block_bytes))
    if cache.prefix_cache_dir is not None:
        check_size(cache.prefix_cache_size, block_bytes)
        open_root(cache.prefix_cache_dir)


def _num_slots(cache: CacheOptions, block_bytes: int) -> int:
    """Returns how many blocks of all groups together the host memory has room for."""
    wanted = cache.kv_offloading_size
    if wanted is None:
        wanted = 0 if cache.prefix_cache_dir is None else max(_default_bytes(), block_bytes)
    if wanted < block_bytes and (wanted or cache.prefix_cache_dir is not None):
        raise ConfigError(
            f"kv_offloading_size: got {format_bytes(wanted)}, allowed is at least one block,"
            f" {format_bytes(block_bytes)}"
        )
    return wanted // block_bytes


def _default_bytes() -> int:
    """Returns the host memory taken without being asked, at most an eighth of what is free."""
    available = Machine().available_bytes()
    if available is None:
        return DEFAULT_OFFLOADING_BYTES
    return min(DEFAULT_OFFLOADING_BYTES, available // 8)


def _block_directory(checkpoint: Checkpoint, loaded: LoadedModel) -> BlockDirectory:
    """Opens the folder of this model's blocks, named by everything that decides their bytes."""
    options, cache, backend = loaded.config.model, loaded.config.cache, loaded.backend
    assert cache.prefix_cache_dir is not None
    root = open_root(cache.prefix_cache_dir)
    parts = {
        "octavo": __version__,
        "format": VERSION,
        "config": checkpoint.config,
        "options": [options.dtype, options.quantization],
        "backend": [backend.name, backend.numerics],
        "layouts": list(map(str, loaded.layouts)),
        "block and split": [BLOCK_SIZE, SPLIT_KEYS],
    }
    return BlockDirectory(
        root,
        fingerprint(parts, checkpoint.weight_files, cache=root),
        max_bytes=cache.prefix_cache_size,
    )
