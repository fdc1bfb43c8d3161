"""How slow this machine is just now: bounds on Python's time hold for one that does nothing else,
and CI's may do much.
"""

import time

LOOP_US = 80
"""What the loop takes where the bounds were measured (one core of an EPYC, 2026)."""


def slowness():
    """How much longer than there the interpreter takes for a loop of its own, at least 1. The 20th
    percentile, as of what is measured.
    """
    times = []
    for _ in range(200):
        began = time.perf_counter()
        made = {}
        for number in range(1000):
            made[number % 37] = (number, [number])
        times.append(time.perf_counter() - began)
    return max(1, sorted(times)[len(times) // 5] * 1e6 / LOOP_US)
