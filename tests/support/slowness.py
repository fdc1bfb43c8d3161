"""Slowness of this machine now, by which bounds on Python's time are scaled: they hold for an idle
one.
"""

import time

LOOP_US = 80
"""Microseconds of the loop where the bounds were measured (one core of an EPYC, 2026)."""


def slowness():
    """Returns how many times longer the interpreter takes for a loop than LOOP_US, at least 1, as
    the 20th percentile of many runs.
    """
    times = []
    for _ in range(200):
        began = time.perf_counter()
        made = {}
        for number in range(1000):
            made[number % 37] = (number, [number])
        times.append(time.perf_counter() - began)
    return max(1, sorted(times)[len(times) // 5] * 1e6 / LOOP_US)
