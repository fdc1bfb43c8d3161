"""What the torch backend makes of a GPU, beside what the GPU can do: correctness first, then
kernels, whole engines, another engine.

    python benchmarks/gpu.py [--call A|B] [--sections NAMES] [--budget SECONDS] [--output FILE]
    [--options JSON] [--tiny] [--device cuda|cpu]

One run on one GPU, in less than nine minutes: prints a table with bounds and goals beside the
measurements, and writes JSON lines to results/DATE-DEVICE.jsonl. Bounds are made of ceilings that
are measured in the same run. Nothing but this tree is needed, no model and no network; PyTorch,
Triton and msgspec have to be there, and transformers and pytest with hypothesis for what they are
compared and checked with. Each section is a process of its own (on_gpu/), for a fault of the device
takes a whole process: one that fails or is not through in its time leaves that in the results, the
others go on, and the exit status is 1. `--tiny --device cpu` is for tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]

from benchmarks.on_gpu.report import Row, compared, is_good, table  # noqa: E402
from benchmarks.on_gpu.run import PREFIX  # noqa: E402
from benchmarks.on_gpu.settings import Ceilings, Settings, python_path  # noqa: E402

BUDGET_S = 520.0
CALL_BUDGETS_S = {"A": 330.0, "B": 400.0}
RESERVE_S = 5.0
"""Seconds reserved for printing the table."""


@dataclass(frozen=True)
class Section:
    """A section of the run."""

    name: str
    most_s: float
    """Seconds that it may take, if as many are left of the budget."""
    options: dict[str, Any] = field(default_factory=dict)
    instead_of: str | None = None
    """Section that must have failed for this one to run."""
    runs: str | None = None
    """Section whose work it does, where that is not its own name."""


STAGES: tuple[tuple[Section, ...], ...] = (
    (Section("ceilings", 60),),
    (
        Section("ops", 140),
        Section("tokens", 140),
        Section("invariance", 140),
        Section("kernel tests", 140),
    ),
    (Section("engine", 150),),
    (Section("engine, eager", 100, {"enforce_eager": True}, instead_of="engine", runs="engine"),),
    (Section("kernels", 70),),
    (Section("engine, 4-bit", 90),),
    (Section("transformers", 90),),
)
"""The sections in the order of their worth. Those of one stage run side by side; a section that is
timed runs alone."""


CALLS: dict[str, tuple[tuple[Section, ...], ...]] = {
    "A": (
        (Section("ceilings", 45),),
        (Section("kernel tests", 150), Section("tokens", 150), Section("ops", 150)),
        (Section("products", 70),),
        (Section("kernels", 60),),
    ),
    "B": (
        (Section("ceilings", 30),),
        (Section("smollm2", 40),),
        (Section("offline", 60),),
        (Section("served", 130),),
        (Section("drafts, adapter", 70),),
        (Section("transformers", 70),),
    ),
}
"""Two shorter runs, for a machine that is lent for a quarter of an hour: A has the correctness and
the kernels, B whole engines and servers.
"""


class Results:
    """The rows of several sections at once, written to the file as soon as they arrive."""

    def __init__(self, path: Path) -> None:
        self.rows: list[Row] = []
        self.path = path
        self._lock = threading.Lock()

    def add(self, row: Row) -> None:
        with self._lock:
            self.rows.append({**row, "at": time.strftime("%H:%M:%S")})
            with self.path.open("a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")

    def failed(self, section: str) -> bool:
        return any(row["section"] == section and "failed" in row for row in self.rows)

    @property
    def ceilings(self) -> Ceilings | None:
        found = next((row["ceilings"] for row in self.rows if "ceilings" in row), None)
        return None if found is None else Ceilings(**found)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parsed(arguments)
    if importlib.util.find_spec("msgspec") is None:
        print(
            "msgspec is not installed: engines and checks need it (a wheel of it can be brought"
            " along)",
            file=sys.stderr,
        )
    folder = args.output.parent if args.output.suffix else args.output
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "gpu.part"
    part.unlink(missing_ok=True)
    results, end = Results(part), time.time() + args.budget - RESERVE_S
    for stage in stages_of(args.call):
        wanted = [section for section in stage if _is_wanted(section, args.sections, results)]
        with ThreadPoolExecutor(max(1, len(wanted))) as pool:
            list(pool.map(lambda section: run(section, args, results, end), wanted))
    for row in against_others(results.rows):
        results.add(row)
    path = args.output if args.output.suffix else folder / file_name(results.rows)
    part.replace(path)
    print(table(results.rows))
    print(f"\nwritten to {path}")
    return 0 if is_good(results.rows) else 1


def stages_of(call: str | None) -> tuple[tuple[Section, ...], ...]:
    return STAGES if call is None else CALLS[call]


def _is_wanted(section: Section, names: Sequence[str], results: Results) -> bool:
    if section.instead_of is not None:
        return section.instead_of in names and results.failed(section.instead_of)
    return section.name in names


def run(section: Section, args: argparse.Namespace, results: Results, end: float) -> None:
    """Runs a section in a process of its own, which is ended when its time is up."""
    now = time.time()
    end = min(end, now + section.most_s)
    if end - now < 1:
        results.add({"section": section.name, "failed": "not begun: the budget is spent"})
        return
    settings = Settings(
        args.device, args.tiny, end, results.ceilings, {**args.options, **section.options}
    )
    command = [
        sys.executable,
        "-m",
        "benchmarks.on_gpu.run",
        section.runs or section.name,
        settings.to_json(),
    ]
    interpret = "1" if args.device == "cpu" else "0"
    environment = os.environ | {
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "TRITON_INTERPRET": interpret,
    }
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    errors: list[str] = []
    readers = [
        threading.Thread(
            target=_read, args=(process.stdout, lambda line: _take(line, section.name, results))
        ),
        threading.Thread(target=_read, args=(process.stderr, errors.append)),
    ]
    for reader in readers:
        reader.start()
    try:
        status = process.wait(max(1.0, end - time.time()))
    except subprocess.TimeoutExpired:
        process.kill()
        results.add(
            {
                "section": section.name,
                "failed": (
                    f"not through in {end - now:.0f} s\n{''.join(errors)[-500:]}not through in time"
                ),
            }
        )
        status = 0
    for reader in readers:
        reader.join(5)
    if status and not results.failed(section.name):
        results.add(
            {"section": section.name, "failed": f"{''.join(errors)[-2000:]}\nended with {status}"}
        )


def _read(stream: Any, take: Callable[[str], object]) -> None:
    for line in stream:
        take(line)


def _take(line: str, section: str, results: Results) -> None:
    if line.startswith(PREFIX):
        row = {**json.loads(line.removeprefix(PREFIX)), "section": section}
        results.add(row)
        print(json.dumps(row)[:300], file=sys.stderr, flush=True)


def against_others(rows: Sequence[Row]) -> list[Row]:
    """Compares tokens per second for the same requests."""
    rates = {row["offered"]: row for row in rows if "offered" in row}
    if not {"octavo", "transformers"} <= rates.keys():
        return []
    count, prompt, output = rates["octavo"]["requests"]
    mine, theirs = (rates[name]["tokens_per_s"] for name in ("octavo", "transformers"))
    shape = f"{count} of {prompt} + {output}"
    return [
        {
            "section": "transformers",
            **compared("tokens/s against transformers", shape, mine, theirs),
        }
    ]


def file_name(rows: Sequence[Row]) -> str:
    """Returns the name of the results' file, made of the day and the device."""
    machine = next((row for row in rows if "device" in row and "date" in row), {})
    device = re.sub(r"[^a-z0-9]+", "-", str(machine.get("device", "unknown")).lower()).strip("-")
    return f"{machine.get('date', time.strftime('%Y-%m-%d'))[:10]}-{device}.jsonl"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", choices=sorted(CALLS), help="one of two shorter runs")
    parser.add_argument(
        "--sections",
        type=lambda text: [name.strip() for name in text.split("/")],
        help="/".join(_names(STAGES)),
    )
    parser.add_argument("--budget", type=float, help="seconds for everything")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        help="a directory, or a file",
    )
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        help='JSON of LLM keywords, e.g. {"attention_backend": "sdpa"}',
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU computes in seconds")
    args = parser.parse_args(arguments)
    names = _names(stages_of(args.call))
    args.sections = args.sections or names
    args.budget = args.budget or CALL_BUDGETS_S.get(args.call, BUDGET_S)
    unknown = [name for name in args.sections if name not in names]
    if unknown:
        parser.error(f"--sections: got {'/'.join(unknown)}, expected {'/'.join(names)}")
    return args


def _names(stages: tuple[tuple[Section, ...], ...]) -> list[str]:
    return [section.name for stage in stages for section in stage if section.instead_of is None]


if __name__ == "__main__":
    sys.exit(main())
