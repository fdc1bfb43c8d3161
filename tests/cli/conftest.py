"""The `octavo` command run in this process, and in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from octavo.cli.main import main
from tests.support.tiny_tokenizer import tiny_model_with_text

SMALL = (
    "--threads=1",
    "--kv-cache-memory-bytes=64MiB",
    "--max-model-len=256",
    "--max-num-seqs=8",
    "--generation-config=vllm",
    '--override-generation-config={"temperature": 0}',
)


REPORTS = ("loading ", "KV cache ", "default sampling params: ", "sampling params: ")
"""Beginnings of the lines that report how a model is loaded."""


@dataclass(frozen=True)
class Ended:
    """The end of a command: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> list[str]:
        """Lines on stderr that are no report of loading."""
        assert "Traceback" not in self.err, self.err
        return [line for line in self.err.splitlines() if not line.startswith(REPORTS)]


@pytest.fixture
def octavo(monkeypatch, capsys) -> Callable[..., Ended]:
    """Runs a command in this process, as in `octavo("run", "hello")`."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["octavo", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            main()
        out, err = capsys.readouterr()
        return Ended(ending.value.code, out, err)

    return run


@pytest.fixture
def tiny() -> list[str]:
    """Options of a small engine over a random model, which writes nonsense."""
    return [f"--model={tiny_model_with_text()}", *SMALL]


def process(*arguments: str, **options) -> subprocess.Popen[str]:
    """Starts the command in a process of its own, with pipes."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "octavo.cli.main", *map(str, arguments)]
    return subprocess.Popen(command, **{"text": True, "env": environment} | pipes | options)


def run_counting_imports(*arguments: str) -> tuple[str, int]:
    """Runs the command in a process of its own; returns its stdout and the modules it imported.

    A start's time is mostly imports, and unlike seconds their number is the same on every machine.
    """
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "octavo.cli.main", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        timeout=120,
        check=True,
    )
    return ended.stdout, ended.stderr.count("import time:")
