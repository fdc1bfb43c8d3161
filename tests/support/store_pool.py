"""Mooncake's own master and store nodes, for tests that skip where it is not installed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.free_ports import free_port


def require_mooncake_store() -> None:
    """Skips a test where Mooncake's store is not installed."""
    pytest.importorskip("mooncake.store", reason="mooncake is not installed", exc_type=ImportError)


NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
sys.stdin.read()
"""


class StorePool:
    """A master and store nodes, which may be ended, stopped and started again."""

    def __init__(self, num_nodes: int) -> None:
        own = str(Path(sys.executable).parent)
        program = shutil.which("mooncake_master", path=own) or shutil.which("mooncake_master")
        assert program is not None, "it comes with the package"
        self._address = f"127.0.0.1:{free_port()}"
        port, metrics = self._address.partition(":")[2], free_port()
        arguments = [f"--rpc_port={port}", f"--metrics_port={metrics}"]
        self._master = subprocess.Popen([program, *arguments], stderr=subprocess.DEVNULL)
        self.nodes: list[subprocess.Popen[str]] = []
        try:
            time.sleep(2)
            self.nodes += [self.start_node() for _ in range(num_nodes)]
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"mooncake://{self._address}"

    def start_node(self) -> subprocess.Popen[str]:
        node = subprocess.Popen(
            [sys.executable, "-c", NODE, self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert node.stdout is not None
        while not node.stdout.readline().startswith("ready"):
            assert node.poll() is None, "the store node did not start"
        return node

    def close(self) -> None:
        for process in [self._master, *self.nodes]:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
