"""Time to write a block of KV first, to write it again and to give it back, in each layout
(SmolLM2's shapes: 90 pages of 4 KiB a block).

    python benchmarks/kv_pages.py

Memory comes in pages of 4 KiB, zeroed. Paged memory is kept; virtual memory comes each time that a
request comes.
"""

import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from octavo.executor.base import BackendOptions
from octavo.executor.kv import KvCache
from octavo.executor.native.backend import NativeBackend, make_kv_layout
from octavo.program.program import CacheGroup

GROUP = CacheGroup("full", "full", 30, 3, 64, 64)
BLOCKS = 128
"""Blocks of a request of 2,048 tokens."""
REQUESTS = 8


def measure(
    kv: KvCache, data: np.ndarray, give_back: Callable[[int, int, int], None] | None
) -> dict[str, float]:
    """Returns microseconds: the median of the requests."""
    first, again, back = [], [], []
    for request in range(REQUESTS):
        begin = request * BLOCKS
        for times in (first, again):
            started = time.perf_counter()
            for block in range(begin, begin + BLOCKS):
                kv.write_block(0, block, data)
            times.append(1e6 * (time.perf_counter() - started) / BLOCKS)
        if give_back is not None:
            started = time.perf_counter()
            give_back(0, begin, BLOCKS)
            back.append(1e6 * (time.perf_counter() - started) / BLOCKS)
    found = {"first": first, "again": again, "given back": back}
    return {name: round(statistics.median(times), 1) for name, times in found.items() if times}


def main() -> None:
    backend = NativeBackend(BackendOptions(kv_cache_dtype="bf16", num_threads=1))
    layout = make_kv_layout(GROUP, "bf16")
    data = np.ones(layout.block_bytes, np.uint8)
    paged = backend.allocate((layout,), [BLOCKS * REQUESTS])
    virtual = backend.allocate_on_demand((layout,), [BLOCKS * REQUESTS])
    print(json.dumps({"paged": measure(paged, data, None)}))
    print(json.dumps({"virtual": measure(virtual, data, virtual.give_back)}))


if __name__ == "__main__":
    main()
