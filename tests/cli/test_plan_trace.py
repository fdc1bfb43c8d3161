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
        ((), "costs: no recording was given"),
        (("--slo=soon",), "slo: got 'soon'"),
        (("--link=fast",), "link: got 'fast'"),
        (("--machines=65",), "machines: got 65, allowed are 1 to 64"),
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


def test_without_a_trace_a_model_is_needed(octavo) -> None:
    ended = octavo("plan")
    assert ended.code != 0 and "no model was given" in ended.err
