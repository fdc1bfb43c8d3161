"""A cluster by Ray on this machine: it starts, is restarted, changes and ends. Needs Ray, which is
not among the development packages: `pip install 'octavo[ray]'`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from octavo.api.errors import BackendUnavailable
from octavo.distributed.cluster.ray_placer import require_ray
from tests.support.free_ports import free_port
from tests.support.tiny_models import tiny_model

START_S = 240.0


def test_without_ray_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendUnavailable, match="Ray cannot be imported") as refused:
        require_ray()
    assert refused.value.hint == "pip install 'octavo[ray]'"


def until(holds: Callable[[], bool], within_s: float = START_S) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.5)


def run_cluster(plan: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts a cluster, whose lines go to the log."""
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "octavo.cli.main", "cluster", str(plan)],
            stderr=file,
            stdout=file,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        )


@pytest.mark.slow
def test_a_cluster_on_one_machine(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    port = free_port()
    plan, log = tmp_path / "plan.yaml", tmp_path / "log"
    model = tiny_model("llama").path
    options = "{max-model-len: 256, kv-cache-memory-bytes: 16MiB, skip-tokenizer-init: true}"

    def write(count: int) -> None:
        plan.write_text(
            f"instances:\n  - {{name: a, model: {model}, count: {count}, cpus: 0.1,"
            f" options: {options}}}\nrouter: {{port: {port}, cpus: 0.1}}\n"
        )

    def servers() -> list[dict]:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/router/servers").json()["data"]
        except httpx.HTTPError:
            return []

    def num_well() -> int:
        return sum(one["is_well"] and one["standing"] == "in" for one in servers())

    def answer() -> list[int]:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        found = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        return found.json()["choices"][0]["token_ids"]

    write(2)
    running = run_cluster(plan, log)
    try:
        until(lambda: num_well() == 2 or running.poll() is not None)
        assert running.poll() is None, log.read_text()
        wanted = answer()
        first = servers()[0]["url"]
        end_server_at(first)
        until(lambda: num_well() == 2)
        assert answer() == wanted
        write(1)
        until(lambda: num_well() == 1 and "a-1 has left" in log.read_text())
        assert answer() == wanted
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(90) == 0, log.read_text()


@pytest.mark.slow
def test_ranks_that_ray_places(tmp_path: Path) -> None:
    """An instance of two ranks, each an actor, answers, and answers again once Ray has replaced a
    rank that was killed.
    """
    pytest.importorskip("ray", reason="Ray is not installed")
    port, log, plan = free_port(), tmp_path / "log", tmp_path / "plan.yaml"
    options = {
        "backend": "torch",
        "device": "cpu",
        "tensor-parallel-size": 2,
        "max-model-len": 256,
        "kv-cache-memory-bytes": "16MiB",
        "skip-tokenizer-init": True,
    }
    group = {"name": "a", "model": str(tiny_model("llama").path), "cpus": 0.1}
    group |= {"ranks_apart": True, "options": options}
    plan.write_text(json.dumps({"instances": [group], "router": {"port": port, "cpus": 0.1}}))

    def answer() -> list[int]:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        with contextlib.suppress(httpx.HTTPError):
            found = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
            if found.status_code == 200:
                return found.json()["choices"][0]["token_ids"]
        return []

    running = run_cluster(plan, log)
    try:
        until(lambda: bool(answer()) or running.poll() is not None)
        assert running.poll() is None, log.read_text()
        wanted = answer()
        before = process_with("rank", "--rank", "1")
        assert before is not None
        os.kill(before, signal.SIGKILL)
        until(lambda: process_with("rank", "--rank", "1") not in (None, before))
        until(lambda: answer() == wanted)
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(90) == 0, log.read_text()


def end_server_at(url: str) -> None:
    """Kills the process that serves at a URL, which nothing but its actor notices."""
    pid = process_with("serve", url.rpartition(":")[2])
    assert pid is not None, f"no process serves at {url}"
    os.kill(pid, signal.SIGKILL)


def process_with(*some: str) -> int | None:
    """Returns the id of an instance's process among whose arguments these are."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "octavo.cli.common.bound" in " ".join(words) and set(some) <= set(words):
            return int(folder.name)
    return None
