"""Colours and status marks: on a terminal, in a pipe, with NO_COLOR and without UTF-8."""

import io
import sys

import pytest

from octavo.cli.common.style import MARKS, format_mark, paint
from tests.support.terminal import show_on_terminal


class Stream(io.TextIOWrapper):
    """A standard output in memory, a terminal or a pipe."""

    def __init__(self, *, encoding: str = "utf-8", is_terminal: bool = True) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def stdout(monkeypatch):
    """Replaces standard output and the environment's colour settings."""

    def replace(environment=None, **kind):
        monkeypatch.setattr(sys, "stdout", Stream(**kind))
        for name, value in {"NO_COLOR": "", "TERM": "xterm", **(environment or {})}.items():
            monkeypatch.setenv(name, value)

    return replace


def test_marks_are_coloured_on_a_terminal(stdout):
    stdout()
    assert format_mark("ok") == "\x1b[32m\x1b[1m✓\x1b[0m"
    assert format_mark("warning") == "\x1b[33m\x1b[1m!\x1b[0m"
    assert format_mark("failure") == "\x1b[31m\x1b[1m✗\x1b[0m"
    assert format_mark("none") == "-"


@pytest.mark.parametrize(
    ("environment", "is_terminal"),
    [({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, True), ({}, False)],
    ids=["NO_COLOR", "dumb", "pipe"],
)
def test_marks_without_colour(stdout, environment, is_terminal):
    stdout(environment, is_terminal=is_terminal)
    assert [format_mark(status) for status in MARKS] == ["✓", "-", "!", "✗"]
    assert paint("text", bold=True) == "text"


def test_marks_are_ascii_without_utf8(stdout):
    stdout(encoding="ascii", is_terminal=False)
    assert [format_mark(status) for status in MARKS] == ["+", "-", "!", "x"]


def test_plan_marks_its_verdict(octavo, tmp_path):
    (tmp_path / "config.json").write_text(CONFIG)
    command = ("plan", tmp_path, "--bandwidth=1G", "--flops=1T")
    shown = show_on_terminal(*command, "--memory=4GiB")
    assert "\x1b[32m\x1b[1m✓\x1b[0m fits, with KV cache for" in shown
    assert "\x1b[31m\x1b[1m✗\x1b[0m does not fit: " in show_on_terminal(
        *command, "--memory=64MiB", code=1
    )
    plain = octavo(*command, "--memory=4GiB").out
    assert "\n✓ fits, with KV cache for" in plain and "\x1b" not in plain
    shown = show_on_terminal(*command, "--memory=4GiB", PYTHONIOENCODING="ascii", NO_COLOR="1")
    assert "\n+ fits, with KV cache for" in shown and "\x1b" not in shown


CONFIG = """{
    "model_type": "llama", "dtype": "bfloat16", "vocab_size": 1024, "hidden_size": 256,
    "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "tie_word_embeddings": false, "hidden_act": "silu", "rms_norm_eps": 1e-5
}"""
