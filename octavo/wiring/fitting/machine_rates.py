"""Measured rates of this machine, cached in a file: memory, matmuls and disk.

A measurement takes a second; it is valid for the same processor, threads and kinds of matmuls, on
the same day: one that was taken while other programs ran is not kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from octavo.config.paths import cache_dir, expand_path
from octavo.executor.base import Ceilings
from octavo.utils.json_cache import read_cache, write_cache
from octavo.wiring.backend import build_backend
from octavo.wiring.plan import ModelPlan
from octavo.worker.machine import Machine
from octavo.worker.memory_split import best_split
from octavo.worker.speed import Roofline

FILE = "machine_rates.json"
MEASURED_BYTES = 256 << 20
"""Number of bytes read to measure the bandwidth: more than any cache holds."""


def get_ceilings(plan: ModelPlan, path: Path | None = None) -> Ceilings:
    """Returns the rates for a plan, cached in `path`; without the disk's."""
    path = path or cache_dir() / FILE
    kinds = {repr(kind): kind for kind in plan.footprint.row_products.values()}
    backend = plan.config.backend
    parts: list[Any] = [Machine().cpu_name(), backend.threads, backend.cpu_level]
    parts += [plan.footprint.code, sorted(kinds), repr(plan.footprint.row_attention)]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    known = _read(path)
    if not isinstance(known.get(key), dict):
        measured = _measure(plan)
        named = {repr(kind): rate for kind, rate in measured.row_rates.items()}
        known[key] = {
            "bandwidth": measured.bandwidth,
            "operations": measured.operations,
            "row_rates": named,
            "kv_rate": measured.kv_rate,
            "stage_seconds": measured.stage_seconds,
        }
        _store(path, known)
    values = dict(known[key])
    named = values.pop("row_rates")
    rates: dict[Hashable, float] = {kinds[kind]: named[kind] for kind in named if kind in kinds}
    return Ceilings(**values, row_rates=rates)


def get_disk_rate(directory: Path, path: Path | None = None) -> float | None:
    """Returns the sequential read rate of a directory's disk in bytes per second, cached in `path`
    by device; None if it cannot be measured.
    """
    from octavo.executor.native.disk import measure_disk

    path = path or cache_dir() / FILE
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = f"disk {directory.stat().st_dev}"
    known = _read(path)
    if not isinstance(known.get(key), float):
        measured = measure_disk(directory)
        if measured is None:
            return None
        known[key] = measured.in_order
        _store(path, known)
    rate: float = known[key]
    return rate


def best_num_requests(plan: ModelPlan, context: int) -> int:
    """Returns the number of requests of `context` tokens with the highest throughput if weights are
    streamed; 1 if the disk's rate is unknown.
    """
    rate = get_disk_rate(expand_path(plan.config.offload.weights_dir or "."))
    if rate is None:
        return 1
    ceilings = replace(get_ceilings(plan), disk=rate)
    split = best_split(Roofline(plan.work, plan.footprint, plan.capacity, ceilings), context)
    return 1 if split is None else split.requests


def _measure(plan: ModelPlan) -> Ceilings:
    backend = build_backend(plan.config)
    try:
        num_bytes = min(plan.capacity.weight_bytes, MEASURED_BYTES)
        return backend.measure(num_bytes, plan.footprint)
    finally:
        backend.close()


def _read(path: Path) -> dict[str, Any]:
    """Returns the rates that were measured today."""
    known, today = read_cache(path), date.today().isoformat()
    return known if known.get("day") == today else {"day": today}


def _store(path: Path, known: dict[str, Any]) -> None:
    """Caches the rates; without space or permission, they are measured again next time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_cache(path, known)
