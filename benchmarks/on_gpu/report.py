"""Rows of the results: a time beside its bound, a share, a comparison or a check; and the table
that is made of them.

A row is a JSON object. `section` is in each of them; then
- measured: `work`, `shape`, `unit` (ms, share or times), `measured`, `bound` (of a time), `share`
  of it, `goal`, whether it is `met`;
- checked: `check`, `ok`, `detail`;
- failed: `failed`, the traceback or why there is none.
Needs the standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = dict[str, Any]

GOALS = {
    "decode, one stream, bf16": 0.85,
    "decode, one stream, 4-bit": 0.65,
    "decode, many streams, bf16": 0.75,
    "prefill, bf16": 0.70,
    "attention alone, decode": 0.85,
    "attention alone, prefill": 0.65,
    "GPU busy, many streams": 0.97,
    "tokens/s against transformers": 3.0,
}
"""Goals for the share of its bound that a measurement reaches, by the beginning of its name."""


def goal_of(work: str) -> float | None:
    return next((goal for name, goal in GOALS.items() if work.startswith(name)), None)


def timed(
    work: str, shape: str, seconds: float, *, bound_s: float | None = None, **more: Any
) -> Row:
    """Makes the row of a time in seconds, beside the least time that the ceilings allow."""
    share = None if bound_s is None or not seconds else bound_s / seconds
    bound = None if bound_s is None else _short(1e3 * bound_s)
    return {
        "work": work,
        "shape": shape,
        "unit": "ms",
        "measured": _short(1e3 * seconds),
        "bound": bound,
        **_judged(work, share),
        **more,
    }


def bound_of(ceilings: Any, *, num_bytes: float = 0.0, operations: float = 0.0) -> float:
    """Returns the least time in seconds: the longer of moving `num_bytes` and of computing
    `operations` in bf16.
    """
    return max(num_bytes / ceilings.bandwidth, operations / ceilings.bf16)


def shared(work: str, shape: str, share: float, **more: Any) -> Row:
    """Makes the row of a share that needs no bound."""
    return {
        "work": work,
        "shape": shape,
        "unit": "share",
        "measured": _short(share),
        "bound": None,
        **_judged(work, share),
        **more,
    }


def compared(work: str, shape: str, mine: float, theirs: float, **more: Any) -> Row:
    """Makes the row of a comparison: how many times the other's rate."""
    times = mine / theirs if theirs else float("inf")
    return {
        "work": work,
        "shape": shape,
        "unit": "times",
        "measured": _short(times),
        "bound": None,
        **_judged(work, times),
        **more,
    }


def checked(check: str, *, ok: bool, detail: str = "") -> Row:
    return {"check": check, "ok": bool(ok), "detail": detail}


def _judged(work: str, share: float | None) -> Row:
    goal = goal_of(work)
    met = None if goal is None or share is None else share >= goal
    return {"share": None if share is None else _short(share), "goal": goal, "met": met}


def _short(number: float) -> float:
    return float(f"{number:.5g}")


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns a table of the measurements, then failed checks and failed sections."""
    rows = list(rows)
    cells = [("work", "shape", "measured", "bound", "share", "goal", "")]
    cells += [_cells(row) for row in rows if "work" in row]
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    lines = [
        "  ".join(
            _aligned(text, width, at)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    checks = [row for row in rows if "check" in row]
    if checks:
        wrong = [row for row in checks if not row["ok"]]
        lines += ["", f"checks: {len(checks) - len(wrong)} of {len(checks)} hold"]
        lines += [f"  WRONG {row['section']}: {row['check']}: {row['detail']}" for row in wrong]
    lines += [
        f"FAILED {row['section']}: {row['failed'].strip().splitlines()[-1]}"
        for row in rows
        if "failed" in row
    ]
    return "\n".join(lines)


def is_good(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether nothing failed and no check is wrong; goals may be missed."""
    return all("failed" not in row and row.get("ok", True) for row in rows)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    unit = {"ms": " ms", "share": "", "times": " x"}[row["unit"]]
    bound = "" if row["bound"] is None else f"{row['bound']:.4g}{unit}"
    share = "" if row["share"] is None or row["unit"] == "times" else f"{row['share']:.1%}"
    goal = (
        ""
        if row["goal"] is None
        else f"{row['goal']:g} x"
        if row["unit"] == "times"
        else f"{row['goal']:.0%}"
    )
    met = {None: "", True: "met", False: "not met"}[row["met"]]
    return row["work"], row["shape"], f"{row['measured']:.4g}{unit}", bound, share, goal, met


def _aligned(text: str, width: int, at: int) -> str:
    return text.ljust(width) if at in (0, 1, 6) else text.rjust(width)
