"""A recording to look at: two dozen requests that share a beginning, wait for room, are cut into
chunks, and are swapped out. The same on every machine.
"""

from __future__ import annotations

import random
from pathlib import Path

from octavo import SamplingParams, __version__
from octavo.config.cache_options import CacheOptions
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.core import EngineCore
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.recording.recorder import FORMAT, Recorder, RecordingHeader
from octavo.engine.scheduler.build import build_scheduler
from octavo.worker.simulated import SimulatedClock, SimulatedExecutor
from tests.support.simulation import Simulation

BLOCK_SIZE = 16
NUM_REQUESTS = 24
MAX_MODEL_LEN = 1024


def write_recording(path: Path, *, num_blocks: int = 144, num_requests: int = NUM_REQUESTS) -> None:
    """Records a simulated engine until all its requests have ended."""
    scheduler = SchedulerOptions(max_num_batched_tokens=192, max_num_seqs=10)
    cache = CacheOptions()
    groups = [BlockGroup(num_blocks, num_host_blocks=64)]
    clock = SimulatedClock()
    log = Recorder(path)
    log.write(
        RecordingHeader(
            FORMAT,
            __version__,
            {},
            scheduler,
            cache,
            groups,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            kv_bytes=0,
        )
    )
    made = build_scheduler(
        scheduler, cache, groups, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN
    )
    core = EngineCore(made, SimulatedExecutor(clock), clock=clock, log=log)
    Simulation(core, clock).run(requests(num_requests))
    core.close()


def requests(count: int) -> list[EngineRequest]:
    """Returns requests that arrive ever closer together; two of three share a system prompt."""
    draw, now, found = random.Random(8), 0.0, []
    shared = list(range(100, 100 + 5 * BLOCK_SIZE))
    for index in range(count):
        now += draw.expovariate(2 + index / 3)
        own = [1000 + 500 * index + i for i in range(draw.randrange(16, 260))]
        params = SamplingParams(temperature=0, max_tokens=draw.randrange(40, 240), ignore_eos=True)
        found.append(
            EngineRequest(
                f"r{index + 1:02}",
                (shared if index % 3 else []) + own,
                params,
                seed=index,
                arrival_time=now,
            )
        )
    return found
