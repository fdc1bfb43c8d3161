"""Ports for servers that have to know theirs before they listen.

A port that the system chose and that was closed again is soon given to another connection.
These lie below the range that Linux chooses from, and each process of tests counts through its own.
"""

from __future__ import annotations

import os
import random
import socket
from itertools import count

FIRST, LAST = 10_000, 32_000
"""Range of the ports, below /proc/sys/net/ipv4/ip_local_port_range as Linux sets it."""

_offsets = count(random.Random(os.getpid()).randrange(LAST - FIRST))


def free_port(num_ports: int = 1) -> int:
    """Returns the first of `num_ports` ports in a row on 127.0.0.1 that nothing listens on."""
    while True:
        first = FIRST + next(_offsets) % (LAST - FIRST)
        wanted = [first] + [FIRST + next(_offsets) % (LAST - FIRST) for _ in range(num_ports - 1)]
        if wanted == list(range(first, first + num_ports)) and all(map(_is_free, wanted)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
