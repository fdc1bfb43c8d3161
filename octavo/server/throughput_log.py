"""Logs the load and throughput of each model at an interval while it has traffic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from octavo.engine.protocol.stats import EngineStats
from octavo.server.state.directory import ModelDirectory


class ThroughputLog:
    def __init__(self, models: ModelDirectory, write: Callable[[str], None]) -> None:
        self._models = models
        self._write = write
        self._last: dict[str, EngineStats] = {}
        self._last_s = time.monotonic()

    async def run(self, interval_s: float) -> None:
        """Logs until it is cancelled."""
        with suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(interval_s)
                self.log(time.monotonic())

    def log(self, now: float) -> None:
        """Writes a line for each model that computed tokens or has requests."""
        elapsed_s, self._last_s = now - self._last_s, now
        for slot in self._models:
            if slot.loaded is None:
                self._last.pop(slot.name, None)
                continue
            stats = slot.loaded.stats()
            before = self._last.get(slot.name, EngineStats())
            if stats.num_steps < before.num_steps:  # the model was loaded again
                before = EngineStats()
            self._last[slot.name] = stats
            if stats.num_steps > before.num_steps or stats.num_running or stats.num_waiting:
                self._write(f"{slot.name}: {format_load(before, stats, elapsed_s)}")


def format_load(before: EngineStats, now: EngineStats, elapsed_s: float) -> str:
    """Formats the load of an engine and its rates since `before`."""
    prompt = (now.prompt_tokens - before.prompt_tokens) / elapsed_s
    generated = (now.generation_tokens - before.generation_tokens) / elapsed_s
    usage = now.num_used_blocks / now.num_blocks if now.num_blocks else 0.0
    queried = now.prefix_query_tokens - before.prefix_query_tokens
    hits = now.prefix_hit_tokens - before.prefix_hit_tokens
    parts = [
        f"running {now.num_running}",
        f"waiting {now.num_waiting}",
        f"KV cache {usage:.1%}",
        f"prompt {prompt:.1f} tok/s",
        f"generation {generated:.1f} tok/s",
    ]
    if queried:
        parts.insert(3, f"prefix cache hit rate {hits / queried:.1%}")
    if now.num_preemptions > before.num_preemptions:
        parts.append(f"preemptions {now.num_preemptions - before.num_preemptions}")
    return ", ".join(parts)
