"""A server in a process of its own, as `octavo serve` starts it, and helpers for its clients."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import pre_tokenizers

from tests.support.backend_choice import backend_flags, chosen_backend

ARGUMENTS = (
    "--threads=1",
    "--kv-cache-memory-bytes=64MiB",
    "--max-model-len=512",
    "--max-num-seqs=64",
    "--port=0",
    "--generation-config=vllm",
    "--log-stats-interval-s=0",
)
PACES = ["--logits-processors=paces=tests.support.processors:paces"]
PACE_FLAGS = [] if chosen_backend("native") == "torch" else PACES
"""Flags of a server that can be asked for a LASTING request; torch has no logits processors, and
is slow without.
"""
START_S = 120
STATE_HOME = str(Path(tempfile.gettempdir()) / "octavo-tests")
"""Folder of what servers keep that have a port of their own and no --state-dir."""


class LiveServer:
    """A server that is ready when made, unless `wait` is False; `lines` holds its stderr."""

    def __init__(
        self,
        model: str,
        *arguments: str,
        wait: bool = True,
        key: str | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """`within` is a command that runs another one, as in a network namespace."""
        command = [
            *within,
            sys.executable,
            "-m",
            "octavo.cli.main",
            "serve",
            model,
            *ARGUMENTS,
            *backend_flags(),
            *arguments,
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.getcwd(),
            "OCTAVO_API_KEY": key or "",
            "XDG_STATE_HOME": STATE_HOME,
        }
        self.lines: list[str] = []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self._key = key
        self._said_enough = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Waits until the server is ready."""
        if not (self._said_enough.wait(START_S) and self.url):
            self.process.kill()
            raise RuntimeError("the server did not start:\n" + "\n".join(self.lines))

    @property
    def url(self) -> str:
        found = re.search(r"^serving .+ on (\S+)$", "\n".join(self.lines), re.MULTILINE)
        return found[1] if found else ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    @property
    def children(self) -> list[int]:
        return children_of(self.process.pid)

    @property
    def core_pid(self) -> int:
        """Process id of the engine, the only child."""
        (pid,) = self.children
        return pid

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=60)

    def async_http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            headers=self.headers,
            timeout=60,
            limits=httpx.Limits(max_connections=None),
        )

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self._key or "none", max_retries=0, timeout=60
        )

    def metric(self, name: str) -> float:
        """Returns the value of a series that has no labels of its own."""
        text = httpx.get(f"{self.url}/metrics", headers=self.headers).text
        return float(re.findall(rf"^octavo:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)[0])

    def stop(self, sign: int = signal.SIGTERM) -> int:
        """Stops the server; returns its exit code."""
        self.process.send_signal(sign)
        return self.process.wait(60)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("try: "):
                self._said_enough.set()
        self._said_enough.set()


def children_of(pid: int) -> list[int]:
    """Returns the processes started by any thread of a process."""
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]


def runs(pid: int) -> bool:
    """Returns whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def events_of(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Returns a stream's events; checks that [DONE] is the last."""
    lines = [line.removeprefix("data: ") for line in lines if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Polls a condition; returns whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def ids_of(text: str) -> list[int]:
    """Returns the tiny tokenizer's token ids: one for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_as_letters = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)[0][0]
    return [4 + letters.index(letter) for letter in bytes_as_letters]


LETTERS = sorted(ids_of("abcdefgh"))

READABLE: dict[str, Any] = {
    "max_tokens": 24,
    "temperature": 1,
    "seed": 3,
    "extra_body": {"allowed_token_ids": LETTERS, "ignore_eos": True},
}
"""Parameters with which a random model writes one of eight letters, 24 times."""

LONG: dict[str, Any] = {
    "prompt": "Hello",
    "n": 32,
    "max_tokens": 500,
    "temperature": 1,
    "ignore_eos": True,
}
"""Parameters of a request that takes a second or two, even with a tiny model; a test must not
depend on its being at work still.
"""

PACED: dict[str, Any] = {"logits_processors": ["paces"]} if PACE_FLAGS else {}
"""Parameters of a request that makes a step of its server with PACE_FLAGS take 20 ms."""

LASTING: dict[str, Any] = {**LONG, **PACED, "n": 1, "max_tokens": 480}
"""Parameters of a request that runs for ten seconds unless a test ends it."""
