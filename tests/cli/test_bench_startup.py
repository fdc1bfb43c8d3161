"""`octavo bench startup` measures processes of their own: time to the first token, and memory."""

import json
import subprocess
import sys

import pytest

from octavo.cli.bench_startup import tree_bytes
from octavo.utils.child_process import start_python

MEBIBYTE = 1 << 20


def test_both_commands_are_started(octavo, tiny):
    ended = octavo("bench", "startup", "--rounds=1", "--json", *tiny)
    found = json.loads(ended.out)
    assert ended.code == 0 and 0 < found["weight_bytes"] < MEBIBYTE
    for command in ("run", "serve"):
        one = found[command]
        assert 0 < one["fastest_s"] == one["first_token_s"] == one["slowest_s"]
        assert one["beyond_weights_bytes"] == one["memory_bytes"] - found["weight_bytes"]
    assert 20 * MEBIBYTE < found["run"]["memory_bytes"] < 150 * MEBIBYTE
    # A fork between the readings of two processes counts shared pages twice.
    assert found["run"]["memory_bytes"] < found["serve"]["memory_bytes"] < 600 * MEBIBYTE


def test_a_command_that_fails_says_why(octavo, tiny, monkeypatch):
    monkeypatch.setattr(
        "octavo.tools.bench.started_server.start_command",
        lambda *_, **options: start_python(
            ["-c", "raise SystemExit('no memory today')"], **options
        ),
    )
    ended = octavo("bench", "startup", "--rounds=1", *tiny)
    assert (
        ended.code == 1
        and ended.message[-1] == "octavo: octavo run ended with exit code 1: no memory today"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_that_of_the_whole_tree():
    held = "held = b'1' * (64 << 20); import sys; print('ready', flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert 64 * MEBIBYTE < tree_bytes(process.pid) < 100 * MEBIBYTE
        process.communicate()
