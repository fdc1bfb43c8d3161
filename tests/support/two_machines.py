"""Two machines for tests: network namespaces, a link between them whose rate a token bucket limits.

Addresses are of 192.0.2.0/24, which is reserved for documentation; no packet leaves the namespaces.
Where the system does not let them be made, a test that wants them is skipped and says so.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

ADDRESSES = ("192.0.2.1", "192.0.2.2")
CLONE_NEWNET = 0x40000000

Found = TypeVar("Found")


class TwoMachines:
    """The machines 0 and 1."""

    def __init__(self) -> None:
        self.names = [f"octavo-{os.getpid()}-{end}" for end in "ab"]
        self._links = [f"oct{end}{os.getpid() % 10**8}" for end in "ab"]

    def make(self, rate: str) -> None:
        """Makes the machines and their link; CalledProcessError or OSError where that cannot be."""
        for name in self.names:
            _run("ip", "netns", "add", name)
        one, other = self._links
        _run("ip", "link", "add", one, "type", "veth", "peer", "name", other)
        for name, link, address in zip(self.names, self._links, ADDRESSES, strict=True):
            _run("ip", "link", "set", link, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            _run("ip", "-n", name, "link", "set", link, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            bucket = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", link, "root", *bucket)

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for link in self._links:  # one that has not come to its namespace
            subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)

    def cut(self) -> None:
        _run("ip", "-n", self.names[0], "link", "set", self._links[0], "down")

    def mend(self) -> None:
        _run("ip", "-n", self.names[0], "link", "set", self._links[0], "up")

    def within(self, machine: int) -> list[str]:
        """Returns the command that runs another one on a machine."""
        return ["ip", "netns", "exec", self.names[machine]]

    def call(self, machine: int, function: Callable[[], Found]) -> Found:
        """Calls a function, in a thread of its own, whose new sockets are on a machine."""
        found: list[Found] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self.enter(machine)
                found.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return found[0]

    def enter(self, machine: int) -> None:
        """Moves the calling thread to a machine, for good."""
        file = os.open(f"/var/run/netns/{self.names[machine]}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(file, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(file)


@contextmanager
def two_machines(rate: str = "1gbit") -> Iterator[TwoMachines]:
    """Makes two machines, and removes them however the test ends."""
    machines = TwoMachines()
    try:
        try:
            machines.make(rate)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"no two machines: network namespaces cannot be made here: {said.strip()}")
        yield machines
    finally:
        machines.remove()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
