"""The `octavo` command: help, version, flags made of config fields, lean imports, exit codes."""

import os
import re
import signal
import subprocess
import sys

import pytest

from octavo.api.errors import EngineDead
from octavo.cli.common.errors import OUTPUT_CLOSED, run_and_report
from octavo.cli.common.exit_codes import INTERRUPTED
from octavo.config.engine_config import option_fields
from octavo.config.option import get_options
from octavo.server.settings import ServerSettings
from tests.cli.conftest import process, run_counting_imports

COMMANDS = ("run", "chat", "serve", "pull", "bench")


def test_help_lists_the_commands(octavo):
    ended = octavo("--help")
    assert ended.code == 0
    assert set(COMMANDS) <= set(ended.out.split())
    assert octavo().out == ended.out


def test_version(octavo):
    assert re.fullmatch(r"octavo \d+\.\d+\.\d+\n", octavo("--version").out)


def flags_of(octavo, *command):
    shown = octavo(*command, "--help-all").out.replace("--[no-]", "--")
    return set(re.findall(r"--[a-z-]+", shown))


def test_every_engine_option_is_a_flag(octavo):
    for command in (["run"], ["chat"], ["serve"], ["bench", "throughput"]):
        flags = flags_of(octavo, *command)
        wanted = {"--" + name.replace("_", "-") for name in option_fields()} - (
            {"--model"} if command == ["serve"] else set()
        )
        assert wanted <= flags, command


def test_every_server_setting_is_a_flag_of_serve(octavo):
    flags = flags_of(octavo, "serve")
    assert {"--" + name.replace("_", "-") for name in get_options(ServerSettings)} <= flags


@pytest.mark.parametrize("command", [(), ("run",), ("serve",)], ids=str)
def test_help_imports_few_modules(command):
    _, num_modules = run_counting_imports(*command, "--help")
    assert num_modules < 280


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("octavo.cli.main", {"typer", "octavo.api.errors", "octavo.cli.app"}),
        ("octavo.cli.app", {"numpy", "fastapi", "octavo.api.llm", "rich", "zmq"}),
        (
            "octavo.cli.app, octavo.api.llm, octavo.text.tokenizer",
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


def test_a_bug_keeps_its_traceback():
    def bug():
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_and_report(bug)


def test_the_exit_code_of_an_engines_fault_is_1(capsys):
    def dies():
        raise EngineDead("the engine process has ended")

    assert run_and_report(dies) == 1
    assert capsys.readouterr().err == "octavo: the engine process has ended\n"


def test_the_exit_code_after_ctrl_c_is_130(tiny):
    running = process("run", "hello", *tiny, "--max-tokens=200", stdin=None)
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=20)
    assert running.returncode in (INTERRUPTED, 0), err  # 0 where the answer was quicker
    assert "Traceback" not in err


@pytest.mark.parametrize("module", ["typer", "octavo.config.sizes", "numpy", "octavo.engine.core"])
def test_ctrl_c_during_imports_ends_quietly_with_130(tiny, module):
    """The signal comes as soon as a module has been imported, long before there is an engine."""
    command = [sys.executable, "-X", "importtime", "-m", "octavo.cli.main", "run", "hello", *tiny]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in running.stderr:
        if line.startswith("import time:") and line.rpartition("|")[2].strip() == module:
            break
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=20)
    assert running.returncode == INTERRUPTED and "Traceback" not in err, err


SET_NAME = """
class Interrupted:
    def __set_name__(self, owner, name):
        raise KeyboardInterrupt

class Owner:
    field = Interrupted()
"""


@pytest.mark.parametrize("source", ["raise KeyboardInterrupt", SET_NAME], ids=["exec", "set-name"])
def test_ctrl_c_within_the_making_of_a_class_is_130(tmp_path, source):
    """Python -m would kill itself after a KeyboardInterrupt that has passed through exec(), and
    Python 3.11 makes a RuntimeError of one that interrupts `__set_name__`.
    """
    (tmp_path / "interrupted.py").write_text(
        "from octavo.cli import app, main\n"
        f"app.run_command = lambda arguments: exec({source!r}, {{}})\n"
        "main.main()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])}
    command = [sys.executable, "-m", "interrupted"]
    assert subprocess.run(command, env=environment, check=False).returncode == INTERRUPTED


@pytest.mark.parametrize("arguments", [["--help"], ["run", "hello", "--max-tokens=200"]], ids=str)
def test_a_reader_that_has_gone_ends_the_command_quietly(tiny, arguments):
    """The exit code is that of a process that SIGPIPE ends: 128 + 13."""
    options = tiny if arguments[0] == "run" else []
    running = process(*arguments, *options, stdin=subprocess.DEVNULL)
    running.stdout.close()
    err = running.stderr.read()
    assert "Traceback" not in err and "BrokenPipe" not in err
    assert running.wait(20) == OUTPUT_CLOSED == 141


def test_a_lack_of_memory_is_one_message(capsys):
    def command() -> None:
        raise MemoryError

    assert run_and_report(command) == 2
    assert capsys.readouterr().err.startswith("octavo: not enough memory\nhint: free memory, or ")


def test_what_a_terminal_cannot_show_is_replaced(tiny):
    running = process(
        "run",
        "--raw",
        "héllo",
        *tiny,
        "--max-tokens=40",
        "--temperature=2",
        "--seed=1",
        text=False,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONIOENCODING": "ascii"},
    )
    out, err = running.communicate()
    assert running.returncode == 0 and b"Traceback" not in err
    assert b"?" in out


def test_bytes_that_are_no_text_are_refused(tiny):
    """Both standard input and arguments are checked."""
    running = process(
        "run",
        "-",
        *tiny,
        text=False,
    )
    _, err = running.communicate(b"a\xff")
    refusal = "expected Unicode text\nhint: write the text in UTF-8"
    assert running.returncode == 2 and refusal in err.decode()
    running = process("run", "\udcff", *tiny)
    _, err = running.communicate()
    assert running.returncode == 2 and refusal in err


def test_plan_fails_at_once_without_a_network():
    """Neither `plan` nor `run` tries again and again."""
    closed = os.environ | {"PYTHONPATH": os.getcwd(), "HF_ENDPOINT": "http://127.0.0.1:9"}
    running = process("plan", "nobody/nothing", env=closed)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 2 and "Hugging Face cannot be reached" in err
    assert "Retrying" not in err
