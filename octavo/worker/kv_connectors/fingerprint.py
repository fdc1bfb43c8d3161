"""Fingerprint of stored blocks: a hash of everything that their bytes depend on, such as the
weights and the options of computation and layout.

Weight files are hashed by content. The hashes are cached next to the blocks and are valid while a
file's size, time and inode are unchanged, so a second start reads no weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from octavo.utils.json_cache import read_cache, write_cache

DIGESTS = "weights.json"

logger = logging.getLogger(__name__)


def fingerprint(parts: Mapping[str, Any], weight_files: Sequence[Path], *, cache: Path) -> bytes:
    """Returns 32 bytes for these parts and files. `cache`: directory of the cached file hashes."""
    known = read_cache(cache / DIGESTS)
    with ThreadPoolExecutor() as pool:
        entries = list(pool.map(lambda path: _entry(path, known), weight_files))
    cached_hashes = dict(zip(map(str, weight_files), entries, strict=True))
    if any(known.get(path) != entry for path, entry in cached_hashes.items()):
        _store(cache / DIGESTS, known | cached_hashes)
    digests = sorted(entry["sha256"] for entry in entries)
    return hashlib.sha256(
        json.dumps({**parts, "weights": digests}, sort_keys=True, default=str).encode()
    ).digest()


def _entry(path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    status = path.stat()
    state = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}
    entry = known.get(str(path))
    if (
        isinstance(entry, dict)
        and {name: entry.get(name) for name in state} == state
        and isinstance(entry.get("sha256"), str)
    ):
        return entry
    with path.open("rb") as file:
        return {**state, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _store(path: Path, entries: Mapping[str, Any]) -> None:
    """Caches the hashes. Ignores a full disk: the next start then reads the weights again."""
    try:
        write_cache(path, entries)
    except OSError as error:
        logger.warning(
            "%s cannot be written; the next start reads the weight files again: %s",
            path,
            error,
        )
