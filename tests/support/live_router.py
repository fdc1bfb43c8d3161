"""A router in a process of its own, as `octavo route` starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence

import httpx
import openai

START_S = 60


class LiveRouter:
    """A router that has checked its servers when it is made; `lines` holds its stderr."""

    def __init__(self, urls: Iterable[str], *arguments: str, within: Sequence[str] = ()) -> None:
        """`within` is a command that runs another one, as in a network namespace."""
        command = [*within, sys.executable, "-m", "octavo.cli.main", "route", *urls, "--port=0"]
        command += ["--health-interval-s=0.2", "--max-health-backoff-s=0.5", *arguments]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        self.lines: list[str] = []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self._is_ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not (self._is_ready.wait(START_S) and self.url):
            self.process.kill()
            raise RuntimeError("the router did not start:\n" + "\n".join(self.lines))

    @property
    def url(self) -> str:
        found = re.search(r"^routing to .+ on (\S+)$", "\n".join(self.lines), re.MULTILINE)
        return found[1] if found else ""

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def async_http(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of a series over all labels but those given."""
        text = httpx.get(f"{self.url}/metrics").text
        rows = re.findall(rf"^octavo:router_{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for given, value in rows if all(one in given for one in wanted))

    def stop(self, sign: int = signal.SIGTERM) -> int:
        """Stops the router; returns its exit code."""
        self.process.send_signal(sign)
        return self.process.wait(20)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("routing to "):
                self._is_ready.set()
        self._is_ready.set()
