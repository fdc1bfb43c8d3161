"""Runs a document's examples as a reader would: one after the other in a folder of their own, with
the `octavo` command of this environment and servers in the background.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.doc_blocks import ROOT, blocks, shell_lines, words_of
from tests.support.free_ports import free_port
from tests.support.live_server import START_S, STATE_HOME, until

LIMIT_S = 300
DEFAULT_SERVER = "octavo serve smollm2"
"""What a reader has started before a page's first request, unless the page starts a server."""
CONSOLE = re.compile(r"^    \$ (.+)\n((?:    (?!\$ ).+\n)*)", re.MULTILINE)
"""A command of a docstring, and what it prints."""
PORT = re.compile(r"(?<=127\.0\.0\.1:)80\d\d|(?<=--port )80\d\d")
PLACEHOLDERS = {
    r"\bMODEL\b": "smollm2",
    r"(?<= )/data/": "data/",
    r"(?<=--text )(FILE|TEXT)\b": "text.txt",
    r"(?<=--calibration )(TEXT|OTHER)\b": "text.txt",
    r"\bFILE\b": "calibration.npz",
    r"\bDIR\b": "directory",
    r"cross-encoder/[\w-]+": "minilm",
}
"""Words of the examples for which readers write their own."""
TYPED = {"octavo chat": "Name the capital of France.\n/bye\n"}
"""What a reader types into commands that begin with these words."""


class Example(NamedTuple):
    """A command in a shell's language, or a Python program."""

    page: str
    line: int
    section: str
    """The last heading before it."""
    language: str
    text: str
    printed: str = ""
    """What the page says that it prints."""
    arguments: tuple[str, ...] = ()
    """Arguments of a Python program."""
    server: str = DEFAULT_SERVER
    """Command of the server that its requests go to."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.partition(chr(10))[0]}"

    @property
    def words(self) -> list[str]:
        return words_of(self.text) or []

    @property
    def is_server(self) -> bool:
        is_serve = self.language == "shell" and self.words[:2] == ["octavo", "serve"]
        return is_serve and "--explain" not in self.words


class Ended(NamedTuple):
    """What an example printed."""

    code: int
    out: str
    err: str


def examples_in(page: Path) -> list[Example]:
    """Returns the examples of a page, or of a Python file."""
    name, lines = str(page.relative_to(ROOT)), page.read_text().splitlines()
    if page.suffix == ".py":
        return [_program(name, page.read_text())]
    found = []
    for block in blocks(page):
        headings = [line for line in lines[: block.line] if line.startswith("#")]
        at = (name, block.line, headings[-1] if headings else "")
        if block.language == "python":
            found.append(Example(*at, "python", block.text))
        printed = block.text.splitlines()[-1] if block.language == "console" else ""
        found += [Example(*at, "shell", line, printed) for line in shell_lines(block)]
    return found


def _program(page: str, text: str) -> Example:
    """Returns a Python file, whose docstring may have a server's command and an output."""
    printed = dict(CONSOLE.findall(ast.get_docstring(ast.parse(text), clean=False) or ""))
    output = "".join(printed[command] for command in printed if command.startswith("python "))
    servers = [command for command in printed if command.startswith("octavo serve")]
    server = servers[0] if servers else DEFAULT_SERVER
    return Example(page, 1, "", "python", text, textwrap.dedent(output), server=server)


class DocSession:
    """A reader's folder and servers; `close` stops the servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.placeholders: Mapping[str, str] = {}
        """The page's own placeholders."""
        self._ports: dict[str, str] = {}
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        """Running servers by their documented ports."""
        self._command = ""
        self._section: str | None = None
        """The command of the server at port 8000, and the section whose requests it answers."""
        binaries = str(Path(sys.executable).parent)
        self._environment = {
            **os.environ,
            "PATH": os.pathsep.join([binaries, os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": STATE_HOME,
            "COLUMNS": "100",
        }

    def run(self, example: Example) -> Ended:
        """Runs an example; a server is started, and asked a question once it is ready."""
        text = self._filled(example.text)
        if example.is_server:
            self._section = example.section
            return self._serve(text, example.words)
        if "127.0.0.1:8000" in example.text and self._section != example.section:
            self._section = example.section
            if self._command != example.server:
                self._serve(self._filled(example.server), example.server.split())
        if example.language == "python":
            name = Path(example.page).stem if example.page.endswith(".py") else "example"
            script = self.folder / f"{name}.py"
            script.write_text(text)
            return self._run([sys.executable, str(script), *example.arguments])
        typed = [typed for start, typed in TYPED.items() if example.text.startswith(start)]
        return self._run(["bash", "-c", text], "".join(typed))

    def close(self) -> None:
        for server in self._servers.values():
            server.send_signal(signal.SIGINT)
        for server in self._servers.values():
            server.wait(60)
        self._servers.clear()
        self._command = ""

    def _run(self, command: list[str], typed: str = "") -> Ended:
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            input=typed,
            timeout=LIMIT_S,
            check=False,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def _serve(self, text: str, words: list[str]) -> Ended:
        """Starts a server in place of one at the same port; returns its answer to a question."""
        port = words[words.index("--port") + 1] if "--port" in words else "8000"
        if port in self._servers:
            self.close()
        if port == "8000":
            self._command = text
        if "--port" not in words:
            text = text.replace(" serve", f" serve --port {self._port(port)}", 1)
        log = self.folder / f"server-{len(list(self.folder.glob('server-*.log')))}.log"
        with log.open("wb") as file:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {text}"],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self._servers[port] = server
        until(lambda: "\ntry: " in log.read_text() or server.poll() is not None, START_S)
        if server.poll() is not None or "\ntry: " not in log.read_text():
            server.kill()
            code = self._servers.pop(port).wait(60)
            return Ended(code or 1, "", log.read_text())
        return self._run(["bash", "-c", self._question(log.read_text())])

    def _question(self, log: str) -> str:
        """Returns the command that a server suggests when it is ready."""
        return log.rpartition("\ntry: ")[2].splitlines()[0]

    def _filled(self, text: str) -> str:
        for pattern, value in {**self.placeholders, **PLACEHOLDERS}.items():
            text = re.sub(pattern, value, text)
        return PORT.sub(lambda found: self._port(found[0]), text)

    def _port(self, documented: str) -> str:
        return self._ports.setdefault(documented, str(free_port()))
