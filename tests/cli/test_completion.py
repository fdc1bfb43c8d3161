"""Shell completion, through bash as a user's shell runs it."""

import os
import subprocess
import sys

import pytest


@pytest.fixture
def bash(tmp_path):
    """Runs a script in bash, with a home of its own in which `octavo` is on the path."""
    command = tmp_path / "octavo"
    command.write_text(f'#!/bin/bash\nexec {sys.executable} $FLAGS -m octavo.cli.main "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PYTHONPATH": os.getcwd(),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }

    def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "--norc", "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env=environment | variables,
        )

    return run


def completing(line: str) -> str:
    """Returns a script that prints what bash offers for the last word of a line."""
    words = line.split(" ")
    return (
        'source <(octavo --show-completion); COMP_LINE="octavo"\n'
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}\n"
        '_octavo_completion octavo; printf "%s\\n" "${COMPREPLY[@]}"'
    )


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("octavo r", ["run", "rank", "route", "rm", "replay"]),
        ("octavo run --max-to", ["--max-tokens"]),
        ("octavo chat --backend na", ["native"]),
        ("octavo bench s", ["serve", "startup"]),
        ("octavo run --nothing", [""]),
    ],
)
def test_bash_is_offered_commands_flags_and_values(bash, line, offered):
    assert bash(completing(line)).stdout.splitlines() == offered


def test_installed_completion_works_in_a_new_shell(bash):
    assert "bash completion installed" in bash("octavo --install-completion; true").stdout
    assert bash("source ~/.bashrc; complete -p octavo").stdout.split()[-1] == "octavo"


def test_completion_imports_no_engine(bash):
    line = {"COMP_WORDS": "octavo ", "COMP_CWORD": "1", "_OCTAVO_COMPLETE": "complete_bash"}
    ended = bash("octavo", FLAGS="-Ximporttime", **line)
    imported = {entry.rpartition("|")[2].strip() for entry in ended.stderr.splitlines()}
    assert "run" in ended.stdout.split() and "octavo.cli.app" in imported
    assert not {"numpy", "octavo.api.llm", "fastapi", "zmq", "rich"} & imported
