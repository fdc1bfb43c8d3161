"""`octavo plan --trace` ranks the layouts of several machines by simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.simulated_engines import recording, trace


def test_the_command_ranks_layouts(octavo, tmp_path: Path) -> None:
    arguments = ["plan", f"--trace={trace(tmp_path / 'trace')}", "--machines=2"]
    arguments += [f"--costs={recording(tmp_path / 'log')}", "--slo=ttft=2s,tpot=80ms"]
    layouts = json.loads(octavo(*arguments, "--json").out)["layouts"]
    rates = [layout["requests_per_s"] for layout in layouts]
    assert len(rates) == 3 and rates == sorted(rates, reverse=True) and rates[-1] > 0
    text = octavo(*arguments).out
    assert "simulated: 20 requests" in text
    assert "1 x prefill + 1 x decode" in text and "1 x both in 2 stages" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "costs: recording required"),
        (("--slo=soon",), "slo: got 'soon'"),
        (("--link=fast",), "link: got 'fast'"),
        (("--machines=65",), "machines: got 65, expected 1 to 64"),
        (("--num-requests=1",), "the first 1 requests of"),
    ],
)
def test_wrong_options_are_refused(
    octavo, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    given = ["plan", f"--trace={trace(tmp_path / 'trace')}"]
    if arguments:
        given.append(f"--costs={recording(tmp_path / 'log')}")
    ended = octavo(*given, *arguments)
    assert ended.code != 0 and message in ended.err


def test_a_wrong_line_of_a_trace_is_named(octavo, tmp_path: Path) -> None:
    path = trace(tmp_path / "trace")
    path.write_text(path.read_text() + '\n{"timestamp": 9000}')
    ended = octavo("plan", f"--trace={path}", f"--costs={recording(tmp_path / 'log')}")
    assert f"{path}, line 21: input_length is missing" in ended.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 21: not valid JSON: "),
        (b'"\xff"', "line 21: not valid JSON: "),
        (b"[1]", "line 21: got [1], expected an object with timestamp"),
        (b'{"timestamp": -1, "input_length": 1, "output_length": 1}', "line 21: timestamp: got -1"),
        (b'{"timestamp": 1e300, "input_length": 1, "output_length": 1}', "expected at most"),
        (b'{"timestamp": 1e999, "input_length": 1, "output_length": 1}', "line 21: "),
        (b'{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length: got 0"),
        (b'{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "input_length: got 1.5"),
        (
            b'{"timestamp": 1, "input_length": 1000000000000, "output_length": 1}',
            "input_length: got 1000000000000, expected at most 16,777,216",
        ),
        (
            b'{"timestamp": 1, "input_length": 1, "output_length": 99999999999}',
            "output_length: got 99999999999, expected at most 16,777,216",
        ),
        (
            b'{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
            "hash_ids: got 1, expected 2 blocks",
        ),
    ],
)
def test_what_is_wrong_in_a_line_is_named(octavo, tmp_path: Path, line, message) -> None:
    path = trace(tmp_path / "trace")
    path.write_bytes(path.read_bytes() + b"\n" + line)
    ended = octavo("plan", f"--trace={path}", f"--costs={recording(tmp_path / 'log')}")
    assert (ended.code, "Traceback" in ended.err) == (2, False) and message in ended.err


@pytest.mark.parametrize("content", [b"", b"\n\n \n"])
def test_a_trace_without_requests_is_refused(octavo, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace").write_bytes(content)
    ended = octavo("plan", f"--trace={tmp_path / 'trace'}", f"--costs={recording(tmp_path / 'l')}")
    assert ended.code == 2 and "holds no requests" in ended.err


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n", b"[" * 100_000, b'{"type": "x"}\n'])
def test_what_is_no_recording_is_named(octavo, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    ended = octavo("plan", f"--trace={trace(tmp_path / 'trace')}", f"--costs={tmp_path / 'log'}")
    assert ended.code == 2 and "log: not a recording" in ended.err


def test_a_damaged_recording_is_named(octavo, tmp_path: Path) -> None:
    log = recording(tmp_path / "log")
    log.write_bytes(log.read_bytes() + b'{"type": "\xff"}\n')
    ended = octavo("plan", f"--trace={trace(tmp_path / 'trace')}", f"--costs={log}")
    assert ended.code == 2 and "is damaged: " in ended.err


@pytest.mark.parametrize(("num_long", "code"), [(1, 0), (5, 2)])
def test_requests_that_an_engine_cannot_take_are_told(
    octavo, tmp_path: Path, num_long: int, code: int
) -> None:
    """Where they are more than a tenth no layout could meet anything."""
    path = trace(tmp_path / "trace")
    row = '\n{"timestamp": 9000, "input_length": 2048, "output_length": 8}'
    path.write_text(path.read_text() + num_long * row)
    log = recording(tmp_path / "log")
    ended = octavo("plan", f"--trace={path}", f"--costs={log}", "--machines=1")
    assert ended.code == code
    assert f"{num_long} of {20 + num_long} requests of trace reach the context of" in ended.err


def test_an_objective_that_every_rate_meets_says_so(octavo, tmp_path: Path) -> None:
    arguments = ["plan", f"--trace={trace(tmp_path / 'trace', 4)}", "--machines=1"]
    arguments += [f"--costs={recording(tmp_path / 'log')}", "--slo=ttft=9000000s,tpot=9000000s"]
    ended = octavo(*arguments)
    assert "+ requests/s" in ended.out and "was the highest tried" in ended.err
    assert json.loads(octavo(*arguments, "--json").out)["layouts"][0]["is_bound"]


def test_without_a_trace_a_model_is_needed(octavo) -> None:
    ended = octavo("plan")
    assert ended.code != 0 and "model required" in ended.err
