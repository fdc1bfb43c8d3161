"""A memory cgroup of one process and its children: all that they take counts, their part of the
system's cache of files included.
"""

import os
import resource
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

EMPTY_S = 10.0
"""Seconds within which the processes of a group that has ended are gone."""

SECTOR_BYTES = 512
"""Bytes of a block in which the system counts what a process reads."""

FILES = (
    ("memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    ("memory.max", "memory.peak"),
)
"""Names of a group's limit and of its peak, in the first and the second version of cgroups."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    returncode: int
    stdout: str
    stderr: str
    peak_bytes: int
    """Most memory that the group took at once."""
    bytes_read: int
    """Bytes that the process and its children read from disks."""


class MemoryGroup:
    """A group below a directory of the memory controller; it is removed at the end."""

    def __init__(self, parent: Path, limit_bytes: int | None) -> None:
        self._path = parent / f"octavo-benchmark-{os.getpid()}"
        self._path.mkdir()
        found = [pair for pair in FILES if (self._path / pair[0]).exists()]
        if not found:
            self._path.rmdir()
            raise SystemExit(f"--cgroup: got {parent}, expected one of the memory controller")
        (limit, self._peak), *_ = found
        if limit_bytes is not None:
            (self._path / limit).write_text(str(limit_bytes))

    def join(self, command: Sequence[str]) -> list[str]:
        """Returns a command that joins the group, then becomes `command`."""
        script = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", script, str(self._path / "cgroup.procs"), *command]

    @property
    def peak_bytes(self) -> int:
        return int((self._path / self._peak).read_text())

    @property
    def num_kills(self) -> int:
        """Number of processes that the kernel has killed for lack of memory."""
        for name in ("memory.oom_control", "memory.events"):
            with suppress(OSError):
                text = (self._path / name).read_text()
                counts = dict(line.split() for line in text.splitlines())
                return int(counts.get("oom_kill", 0))
        return 0

    def run(self, command: Sequence[str], timeout_s: float) -> Ended:
        """Runs a command to its end, in the group."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock
        done = subprocess.run(
            self.join(command),
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        blocks = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock - before
        peak_bytes, num_bytes = self.peak_bytes, blocks * SECTOR_BYTES
        return Ended(done.returncode, done.stdout, done.stderr, peak_bytes, num_bytes)

    def __enter__(self) -> "MemoryGroup":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = time.monotonic() + EMPTY_S
        while time.monotonic() < end:
            with suppress(OSError):
                self._path.rmdir()
                return
            time.sleep(0.1)
        raise SystemExit(f"{self._path} still has processes")
