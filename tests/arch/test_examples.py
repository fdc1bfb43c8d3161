"""The examples run, and are short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

FOLDER = Path(__file__).parents[2] / "examples"
OFFLINE = ("generate.py", "chat.py", "many_at_once.py", "beam_search.py")
ONLINE = {"openai_client.py": "/v1", "jobs.py": ""}


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, FOLDER / name, *arguments]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_all_are_known_and_short():
    files = sorted(FOLDER.glob("*.py"))
    assert {file.name for file in files} == {*OFFLINE, *ONLINE}
    assert all(len(file.read_text().splitlines()) < 40 for file in files)


@pytest.mark.parametrize("name", OFFLINE)
def test_offline(name):
    assert run(name, str(tiny_model_with_text())).strip()


def test_online():
    server = LiveServer(str(tiny_model_with_text()), "--served-model-name=tiny")
    try:
        for name, path in ONLINE.items():
            assert run(name, server.url + path).strip(), name
    finally:
        assert server.stop() == 0


@pytest.mark.model
def test_the_default_model_answers():
    assert "Paris" in run("chat.py")
