"""A log of finished tests, by which a long run goes on where it was stopped (`make soak`).

One JSON line a test: id, outcome, seconds, commit. A test that has passed at the same commit is not
run again. At the end a summary of all runs at this commit is written beside the log.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class ProgressLog:
    """Pytest plugin over one log file, to which the controlling process appends."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self.writes = writes
        self.commit = commit()

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Returns the last line of each test at this commit, by the test's id."""
        if not self.path.exists():
            return {}
        lines = map(json.loads, self.path.read_text().splitlines())
        return {line["test"]: line for line in lines if line["commit"] == self.commit}

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Deselects the tests that have passed already."""
        outcomes = self.outcomes()
        passed = {test for test, line in outcomes.items() if line["outcome"] == "passed"}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Appends the outcome of a test's call, or of a set-up that failed or skipped it."""
        if not self.writes or (report.when != "call" and report.outcome == "passed"):
            return
        line = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 3),
            "commit": self.commit,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as log:
            log.write(json.dumps(line) + "\n")

    def pytest_sessionfinish(self) -> None:
        """Writes `<log>.summary.json`: counts, seconds, and the twenty slowest tests."""
        lines = list(self.outcomes().values())
        if not self.writes or not lines:
            return
        slowest = sorted(lines, key=lambda line: -line["seconds"])[:20]
        summary = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": platform.machine(),
            "commit": self.commit,
            "outcomes": Counter(line["outcome"] for line in lines),
            "failed": [line["test"] for line in lines if line["outcome"] == "failed"],
            "seconds": round(sum(line["seconds"] for line in lines)),
            "slowest": {line["test"]: line["seconds"] for line in slowest},
        }
        self.path.with_suffix(".summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def commit() -> str:
    """Returns the commit of the working tree."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
