"""The command itself: help, version, flags made of config fields, lean imports, exit codes."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from octavo.cli.errors import INTERRUPTED, exit_code_of
from octavo.config.engine_config import option_fields, options_of
from octavo.errors import EngineDead
from octavo.server.settings import ServerSettings
from tests.cli.conftest import process

COMMANDS = ("run", "chat", "serve", "pull", "bench")


def test_help_lists_the_commands(octavo):
    ended = octavo("--help")
    assert ended.code == 0
    assert set(COMMANDS) <= set(ended.out.split())
    assert octavo().out == ended.out


def test_version(octavo):
    assert re.fullmatch(r"octavo \d+\.\d+\.\d+\n", octavo("--version").out)


def test_every_engine_option_is_a_flag(octavo):
    for command in (["run"], ["chat"], ["serve"], ["bench", "throughput"]):
        flags = set(re.findall(r"--[a-z-]+", octavo(*command, "--help").out))
        wanted = {"--" + name.replace("_", "-") for name in option_fields()} - (
            {"--model"} if command == ["serve"] else set()
        )
        assert wanted <= flags, command


def test_every_server_setting_is_a_flag_of_serve(octavo):
    flags = set(re.findall(r"--[a-z-]+", octavo("serve", "--help").out))
    assert {"--" + name.replace("_", "-") for name in options_of(ServerSettings)} <= flags


@pytest.mark.alone
def test_help_is_quick():
    def seconds() -> float:
        start = time.perf_counter()
        assert process("--help").wait() == 0
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.3


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("octavo.cli.main", {"numpy", "fastapi", "octavo.llm", "rich", "zmq"}),
        (
            "octavo.cli.main, octavo.llm, octavo.text.tokenizer",
            {"fastapi", "uvicorn", "huggingface_hub", "torch", "transformers", "rich"},
        ),
    ],
)
def test_imports_are_lean(modules, absent):
    code = f"import {modules}, sys; print(' '.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not absent & set(loaded)


def test_what_has_no_known_kind_keeps_its_traceback():
    def bug():
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        exit_code_of(bug)


def test_the_engines_fault_is_1(capsys):
    def dies():
        raise EngineDead("the engine process has ended")

    assert exit_code_of(dies) == 1
    assert capsys.readouterr().err == "octavo: the engine process has ended\n"


def test_ctrl_c_is_130(tiny):
    running = process("run", "hello", *tiny, "--max-tokens=200", stdin=None)
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=20)
    assert running.returncode in (INTERRUPTED, 0), err  # 0 where the answer was quicker
    assert "Traceback" not in err


def test_a_reader_that_has_gone_is_no_traceback(tiny):
    running = process("run", "hello", *tiny, "--max-tokens=200")
    running.stdout.close()
    assert "Traceback" not in running.stderr.read()
    assert running.wait(20) == 1


def test_no_memory_is_one_message(capsys):
    def command() -> None:
        raise MemoryError

    assert exit_code_of(command) == 2
    assert capsys.readouterr().err.startswith("octavo: not enough memory\nhint: free memory, or ")


def test_bytes_that_are_no_text_are_no_traceback(tiny):
    """Read, they are replaced; in an argument they are refused; what a terminal cannot show is
    replaced.
    """
    running = process(
        "run",
        "-",
        *tiny,
        "--max-tokens=20",
        text=False,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONIOENCODING": "ascii"},
    )
    _, err = running.communicate(b"a\xff")
    assert running.returncode == 0 and b"Traceback" not in err
    running = process("run", "\udcff", *tiny)
    _, err = running.communicate()
    assert (
        running.returncode == 2 and "allowed is Unicode text\nhint: write the text in UTF-8" in err
    )
