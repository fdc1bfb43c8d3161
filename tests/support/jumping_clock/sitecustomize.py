"""Python's wall clock with an offset in seconds, which the file OCTAVO_CLOCK_OFFSET names holds.

In front of PYTHONPATH it makes the clock of a server jump when a test writes the file.
"""

import os
import time

_PATH = os.environ.get("OCTAVO_CLOCK_OFFSET", "")
_time, _time_ns = time.time, time.time_ns


def _offset() -> float:
    try:
        with open(_PATH, encoding="ascii") as file:
            return float(file.read() or 0)
    except (OSError, ValueError):
        return 0.0


if _PATH:
    time.time = lambda: _time() + _offset()
    time.time_ns = lambda: _time_ns() + int(_offset() * 1e9)
