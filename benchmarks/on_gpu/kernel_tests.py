"""The suite's own tests of Triton's kernels and of CUDA's code paths, on the device: a process for
each file, some at a time.

A fault of the device ends one process and no other file's tests. Without a GPU they run in Triton's
interpreter, as in the suite.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.on_gpu.report import checked
from benchmarks.on_gpu.settings import ROOT, Emit, Settings, attempt, python_path

FILES = (
    "tests/executor/torch/triton/test_attention.py",
    "tests/executor/torch/triton/test_shared_prefix.py",
    "tests/executor/torch/triton/test_fixed_tiles.py",
    "tests/executor/torch/triton/test_products.py",
    "tests/executor/torch/test_prompts.py",
    "tests/executor/torch/triton/test_rows.py",
    "tests/executor/torch/triton/test_pick.py",
    "tests/executor/torch/triton/test_fp8_rows.py",
    "tests/executor/torch/triton/test_rope_write.py",
    "tests/executor/torch/triton/test_block_copies.py",
    "tests/executor/torch/test_graphs.py",
)
TINY_FILES = ("tests/executor/torch/triton/test_kernels.py",)
AT_ONCE = 6
MOST_NAMED = 5


def section(settings: Settings, emit: Emit) -> None:
    files = TINY_FILES if settings.tiny else FILES
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(
            pool.map(lambda file: attempt(emit, file, partial(_file, file, settings, emit)), files)
        )


@dataclass(frozen=True)
class Report:
    """A pytest report of one file: how many tests ran, and which failed, with the end of their
    output.
    """

    num_tests: int
    num_skipped: int
    wrong: tuple[str, ...]

    @staticmethod
    def of(path: Path) -> Report:
        cases = list(ElementTree.parse(path).iter("testcase"))
        wrong = []
        for case in cases:
            fault = next(
                (case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None),
                None,
            )
            if fault is not None:
                message = fault.get("message") or "?"
                wrong.append(f"{case.get('name')}: {message.splitlines()[0][:160]}")
        return Report(
            len(cases), sum(case.find("skipped") is not None for case in cases), tuple(wrong)
        )


def _file(file: str, settings: Settings, emit: Emit) -> None:
    """Runs one file. The environment says whether Triton interprets, wherever the driver is
    found.
    """
    environment = os.environ | {
        "PYTHONPATH": python_path(),
        "TRITON_INTERPRET": "1" if settings.device == "cpu" else "0",
    }
    # One process did not finish the attention tests in its time.
    workers = max(2, (os.cpu_count() or 2) // AT_ONCE)
    has_xdist = importlib.util.find_spec("xdist") is not None
    parallel = ["-n", str(workers)] if has_xdist and not settings.tiny else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *([] if settings.tiny else ["--tier", "all"]),  # most are slow in the interpreter alone
            *parallel,
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            file,
        ]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=max(1.0, settings.left_s),
                check=False,
            )
        except subprocess.TimeoutExpired:
            emit(checked(file, ok=False, detail="not through in time"))
            return
        if not report.exists():
            raise RuntimeError(
                f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
            )
        found = Report.of(report)
    detail = (
        f"{found.num_tests - len(found.wrong) - found.num_skipped} tests hold, {found.num_skipped}"
        " skipped"
    )
    if found.wrong:
        detail += f", {len(found.wrong)} do not: {'; '.join(found.wrong[:MOST_NAMED])}"
    emit(checked(file, ok=not found.wrong and found.num_tests > 0, detail=detail))
