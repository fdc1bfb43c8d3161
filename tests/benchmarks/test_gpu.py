"""The GPU benchmark over shapes that a CPU computes in seconds: its rows, its bounds' arithmetic,
and its failed sections.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import STAGES, against_others, file_name, parsed, run
from benchmarks.gpu import Results as GpuResults
from benchmarks.gpu import Section as GpuSection
from benchmarks.on_gpu.engine import TINY, weight_bytes_read
from benchmarks.on_gpu.kernel_tests import FILES, Report
from benchmarks.on_gpu.report import (
    GOALS,
    bound_of,
    checked,
    compared,
    goal_of,
    is_good,
    shared,
    table,
    timed,
)
from benchmarks.on_gpu.run import FUNCTIONS
from benchmarks.on_gpu.settings import Ceilings, Settings, attempt
from benchmarks.on_gpu.shapes import LLAMA_8B, attention_operations, model_of
from benchmarks.on_gpu.timing import Mark, seconds_each
from benchmarks.on_gpu.watch import Steady, Step, busy_share
from octavo.checkpoint.dummy import DummyWeights
from octavo.checkpoint.open import ConfigFile
from octavo.executor.base import BackendOptions
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs

ROOT = Path(__file__).parents[2]
CEILINGS = Ceilings(bandwidth=4e12, bf16=8e14)
CPU = torch.device("cpu")


def test_the_arithmetic_of_bounds():
    assert bound_of(CEILINGS, num_bytes=8e9) == 2e-3
    assert bound_of(CEILINGS, num_bytes=8e9, operations=4e12) == 5e-3, "the longer of the two"
    row = timed("decode, one stream, bf16", "context 9", 2.5e-3, bound_s=2e-3, steps=3)
    assert (row["measured"], row["bound"], row["share"], row["goal"], row["met"], row["steps"]) == (
        2.5,
        2.0,
        0.8,
        0.85,
        False,
        3,
    )
    assert timed("decode, one stream, bf16", "", 2.2e-3, bound_s=2e-3)["met"] is True
    assert timed("no goal", "", 1.0)["met"] is None
    assert shared("GPU busy, many streams, bf16", "", 0.98)["met"] is True
    assert compared("tokens/s against transformers", "", 500, 200) | {"shape": ""} == {
        "work": "tokens/s against transformers",
        "shape": "",
        "unit": "times",
        "measured": 2.5,
        "bound": None,
        "share": 2.5,
        "goal": 3.0,
        "met": False,
    }


def test_what_an_8b_model_reads_and_computes():
    """Llama-3-8B has 8.03 billion numbers, of which the embedding's half billion are looked up."""
    shape = LLAMA_8B
    matrices = shape.layers * shape.layer_numbers + shape.vocab * shape.hidden
    norms = (2 * shape.layers + 1) * shape.hidden
    assert matrices + norms + shape.vocab * shape.hidden == 8_030_261_248
    assert shape.kv_bytes(1) == 128 << 10
    assert attention_operations(2, heads=1, head_width=4) == 4 * 4 * 3, (
        "row 0 sees one key, row 1 two"
    )
    whole = shape.prefill_operations(8192)
    assert whole == pytest.approx(
        2 * 8192 * (matrices - shape.vocab * shape.hidden) + 32 * 4 * 4096 * 8192 * 8193 / 2,
        rel=1e-4,
    )


def test_a_program_s_bytes_are_all_but_what_is_looked_up():
    from benchmarks.on_gpu.shapes import TINY as shape

    with model_of(shape) as path:
        header = ConfigFile(path / "config.json")
        program = build_programs(header.config)["decoder"]
        load = DummyWeights(lambda weight: header.get_format(weight.name)).load
        prepared = TorchBackend(BackendOptions(num_threads=1)).prepare_program(program, load)
    matrices = shape.layers * shape.layer_numbers + shape.vocab * shape.hidden
    norms = (2 * shape.layers + 1) * shape.hidden
    assert weight_bytes_read(prepared) == 2 * matrices + 4 * norms


class At:
    """A mark at a moment."""

    def __init__(self, at):
        self.at = at

    def until(self, other):
        return other.at - self.at


def test_steady_steps_of_a_device():
    """The device idles 1 ms in a steady 10 ms step and the host 4; the first steps, and others',
    are left out.
    """
    steps = [Step(2, 9, 40, 0.0, At(0), At(1))]
    steps += [
        Step(2, 2, 50 + i, i / 100, At(i / 100), At(i / 100 + 0.009), waited_s=0.004)
        for i in range(12)
    ]
    steady = Steady.of(steps, 2, 6, skip=3)
    assert [step.keys for step in steady.steps] == [53, 54, 55, 56, 57, 58] and steady.keys == 55.5
    assert steady.step_s == pytest.approx(0.01) and steady.host_s == pytest.approx(0.006)
    assert steady.busy == pytest.approx(1 - 5 * 0.001 / 0.05)
    with pytest.raises(RuntimeError, match="1 steady steps of 2 requests, expected 2"):
        Steady.of(steps[:3], 2, 6, skip=1)


def test_the_share_of_time_in_which_kernels_run():
    assert busy_share([(0, 4), (2, 5), (8, 10)]) == 0.7
    assert busy_share([(3, 6), (0, 3)]) == 1.0 and busy_share([]) == 0.0


def test_times_on_a_cpu():
    calls = []
    assert seconds_each([lambda: calls.append(1), lambda: calls.append(2)], CPU, rounds=3) >= 0
    assert calls == [1, 2] * 5
    first = Mark(CPU)
    assert 0 <= first.until(Mark(CPU)) < 60


def test_the_table_and_the_verdict():
    rows = [
        {"section": "engine", **timed("prefill, bf16", "1 x 8,192", 0.2, bound_s=0.15)},
        {"section": "ops", **checked("llama", ok=True)},
    ]
    assert is_good(rows) and "prefill, bf16" in table(rows) and "75.0%   70%  met" in table(rows)
    wrong = [*rows, {"section": "ops", **checked("gpt2", ok=False, detail="0.5")}]
    assert (
        not is_good(wrong)
        and "checks: 1 of 2 hold" in table(wrong)
        and "WRONG ops: gpt2: 0.5" in table(wrong)
    )
    failed = [*rows, {"section": "kernels", "failed": "Traceback\nValueError: no\n"}]
    assert not is_good(failed) and "FAILED kernels: ValueError: no" in table(failed)


def test_what_fails_leaves_its_traceback_and_lets_the_rest_go_on():
    rows = []
    attempt(rows.append, "a half", lambda: 1 / 0)
    assert rows[0]["what"] == "a half" and "ZeroDivisionError" in rows[0]["failed"]


def test_every_goal_is_of_something_measured_and_every_section_has_a_function():
    assert (
        goal_of("attention alone, decode") == 0.85
        and goal_of("decode, many streams, 4-bit") is None
    )
    assert len(GOALS) == 8
    for stage in STAGES:
        assert {section.runs or section.name for section in stage} <= FUNCTIONS.keys()
    assert (
        sum(
            max(section.most_s for section in stage)
            for stage in STAGES
            if stage[0].instead_of is None
        )
        <= 9 * 60 + 60
    )
    assert all((ROOT / file).exists() for file in FILES)
    settings = Settings("cuda", False, 5.0, CEILINGS, {"enforce_eager": True})
    assert Settings.of_json(settings.to_json()) == settings


def test_the_comparison_and_the_name_of_the_file():
    rows = [
        {"offered": name, "requests": [2, 3, 4], "tokens_per_s": rate}
        for name, rate in (("octavo", 90), ("transformers", 30))
    ]
    (row,) = against_others(rows)
    assert row["measured"] == 3.0 and row["met"] is True and row["shape"] == "2 of 3 + 4"
    assert against_others(rows[:1]) == []
    assert (
        file_name([{"device": "NVIDIA H200", "date": "2026-11-23 10:11"}])
        == "2026-11-23-nvidia-h200.jsonl"
    )


def test_reports_of_the_suite(tmp_path):
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase'
        ' name="b"><skipped/></testcase><testcase name="c"><failure message="assert 1 =='
        ' 2&#10;more">x</failure></testcase></testsuite></testsuites>'
    )
    assert Report.of(tmp_path / "report.xml") == Report(3, 1, ("c: assert 1 == 2",))


def test_a_section_that_is_not_through_in_time_is_ended(tmp_path):
    """A section that exceeds its time is ended, and one that does not exist stops no other."""
    args, results = parsed(["--tiny", "--device", "cpu"]), GpuResults(tmp_path / "part")
    run(GpuSection("ceilings", 1.2), args, results, 2e9)
    run(GpuSection("nothing", 60), args, results, 4e9)
    run(GpuSection("late", 60), args, results, 0.0)
    failed = {row["section"]: row["failed"] for row in results.rows if "failed" in row}
    assert (
        failed["ceilings"].endswith("not through in time")
        and "KeyError: 'nothing'" in failed["nothing"]
    )
    assert failed["late"] == "not begun: the budget is spent"
    assert [
        json.loads(line) for line in (tmp_path / "part").read_text().splitlines()
    ] == results.rows


def written(tmp_path, sections, *more):
    """Runs a section; returns its rows and its output."""
    path = tmp_path / "made.jsonl"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--tiny",
        "--device",
        "cpu",
        "--sections",
        sections,
    ]
    done = subprocess.run(
        [*command, "--output", str(path), *more],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in path.read_text().splitlines()], done.stdout


@pytest.mark.slow
def test_a_run_over_an_engine(tmp_path):
    rows, out = written(tmp_path, "ceilings/engine")
    machine, ceilings = rows[0], next(row["ceilings"] for row in rows if "ceilings" in row)
    assert (
        machine["torch"] == torch.__version__
        and {"date", "device", "python", "triton", "transformers"} <= machine.keys()
    )
    works = {row["work"]: row for row in rows if "work" in row}
    assert list(works) == [
        "decode, one stream, bf16",
        "decode, many streams, bf16",
        "GPU busy, many streams, bf16",
        "prefill, bf16",
    ]
    many = works["decode, many streams, bf16"]
    assert many["shape"].startswith(f"{TINY.streams} x ") and many["steps"] == TINY.decoded
    assert many["bound"] == pytest.approx(1e3 * many["bytes"] / ceilings["bandwidth"], rel=1e-3)
    assert many["share"] == pytest.approx(many["bound"] / many["measured"], rel=1e-3)
    assert 0 < works["GPU busy, many streams, bf16"]["measured"] <= 1 and many["host_ms"] > 0
    assert [row["profile"] for row in rows if "profile" in row] == [
        name for name in works if not name.startswith("GPU")
    ]
    assert all(row["kernels"] for row in rows if "profile" in row)
    assert next(row for row in rows if "offered" in row)["tokens_per_s"] > 0
    assert "goal" in out and "decode, one stream, bf16" in out and "written to" in out


@pytest.mark.slow
def test_a_run_over_everything(tmp_path):
    """A run over all sections passes, Triton's kernels in its interpreter."""
    names = [section.name for stage in STAGES for section in stage if section.instead_of is None]
    rows, out = written(tmp_path, "/".join(names), "--budget", "900")
    works = {row["work"] for row in rows if "work" in row}
    assert {
        "attention alone, decode",
        "attention alone, prefill",
        "decode, one stream, 4-bit",
        "draw, greedy",
    } <= works
    assert (
        all(row["ok"] for row in rows if "check" in row)
        and len([row for row in rows if "check" in row]) >= 8
    )
    assert any(
        "is for GPUs" in row.get("note", "") for row in rows if row["section"] == "transformers"
    )
    assert "checks: " in out and "FAILED" not in out
