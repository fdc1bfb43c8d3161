"""An engine for simulated fleets, and recordings of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.config.cache_options import CacheOptions
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.core import EngineCore
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.protocol.kv_cache_spec import get_window_spec
from octavo.engine.protocol.step_costs import CostPoint, StepCosts
from octavo.engine.recording.recorder import FORMAT, Recorder, RecordingHeader
from octavo.engine.scheduler.build import build_scheduler
from octavo.tools.simulated_fleet import SimulatedEngine
from octavo.utils.version import __version__
from octavo.worker.simulated import SimulatedClock, SimulatedCosts, SimulatedExecutor
from tests.support.simulation import request_of

COSTS = StepCosts((CostPoint(1, 0, 0.01), CostPoint(64, 0, 0.064), CostPoint(512, 0, 0.512)))
"""A millisecond for each token of a prompt; ten for a step of a single row."""

ENGINE = SimulatedEngine(
    SchedulerOptions(max_num_batched_tokens=512, max_num_seqs=16, num_scheduler_steps=1),
    CacheOptions(),
    [BlockGroup(400, get_window_spec(None), 0)],
    block_size=16,
    max_model_len=2048,
    costs=COSTS,
    token_bytes=1000.0,
)


def recording(path: Path, **options: Any) -> Path:
    """Writes a recording of ENGINE, with steps measured; `options` are its flat ones."""
    clock = SimulatedClock()
    costs = SimulatedCosts(table=((1, 0.01), (64, 0.064), (512, 0.512)), context_token_s=0.0)
    header = RecordingHeader(
        FORMAT,
        __version__,
        {"model": "none"} | options,
        ENGINE.scheduler,
        ENGINE.cache,
        list(ENGINE.groups),
        block_size=16,
        max_model_len=2048,
        kv_bytes=400 * 16 * 1000,
    )
    log = Recorder(path)
    log.write(header)
    scheduler = build_scheduler(
        ENGINE.scheduler, ENGINE.cache, ENGINE.groups, block_size=16, max_model_len=2048
    )
    core = EngineCore(scheduler, SimulatedExecutor(clock, costs), clock=clock, log=log)
    for number in range(6):
        core.add(request_of(f"r{number}", 0.0, 60 + 80 * number, 30))
    while core.has_work:
        core.step()
    core.close()
    return path


def trace(path: Path, num_requests: int = 20) -> Path:
    rows = [
        {"timestamp": 500 * number, "input_length": 300, "output_length": 8, "hash_ids": [number]}
        for number in range(num_requests)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
