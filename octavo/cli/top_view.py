"""Tables of `octavo top`: models and requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from octavo.cli.top_reading import Reading

MODEL_COLUMNS = (
    "model",
    "state",
    "running",
    "waiting",
    "swapped",
    "KV usage",
    "KV blocks",
    "prompt tok/s",
    "gen tok/s",
    "prefix hits",
    "drafts",
    "accepted",
)
REQUEST_COLUMNS = (
    "request",
    "model",
    "state",
    "key",
    "age",
    "queued",
    "prompt",
    "generated",
    "KV blocks",
)
LEFT_OUT = {
    "model": (
        "accepted",
        "drafts",
        "swapped",
        "prompt tok/s",
        "KV blocks",
        "prefix hits",
        "waiting",
        "KV usage",
    ),
    "request": ("KV blocks", "key", "model", "queued", "prompt"),
}
"""Columns to omit on a narrow terminal, the first ones first."""
GAP = 2
"""Spaces between columns."""
NUM_TEXT_COLUMNS = {"model": 2, "request": 4}
"""Number of text columns at the left of each table; the others are numbers."""
MIN_TEXT_WIDTH = 7
"""Minimum width of a text column; narrower text wraps."""


def render_view(before: Reading, now: Reading) -> RenderableType:
    """Renders a reading; rates are since the previous one."""
    models = FittedTable(MODEL_COLUMNS, [_model_row(name, before, now) for name in now.states])
    requests = FittedTable(REQUEST_COLUMNS, list(map(_request_row, now.requests)))
    listed = requests if now.requests else Text(now.note or "no running or waiting requests")
    return Group(Text(now.url, style="bold"), models, listed)


class FittedTable:
    """A table that omits columns if the terminal is too narrow."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._columns = columns
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left_out = LEFT_OUT[self._columns[0]]
        numbers = range(len(left_out) + 1)
        fitting = (n for n in numbers if self._get_min_width(left_out[:n]) <= options.max_width)
        yield self._without(left_out[: next(fitting, len(left_out))])

    def _get_min_width(self, left_out: Sequence[str]) -> int:
        """Returns the minimum width without truncation."""
        shown = [index for index, name in enumerate(self._columns) if name not in left_out]
        return sum(self._get_min_column_width(index) + GAP for index in shown) - GAP

    def _get_min_column_width(self, index: int) -> int:
        if index < NUM_TEXT_COLUMNS[self._columns[0]]:
            return MIN_TEXT_WIDTH
        return max(len(row[index]) for row in (self._columns, *self._rows))

    def _without(self, left_out: Sequence[str]) -> Table:
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        shown = [index for index, name in enumerate(self._columns) if name not in left_out]
        for index in shown:
            is_text = index < NUM_TEXT_COLUMNS[self._columns[0]]
            table.add_column(
                self._columns[index],
                justify="left" if is_text else "right",
                no_wrap=not is_text,
                overflow="fold",
                min_width=MIN_TEXT_WIDTH if is_text else None,
            )
        for row in self._rows:
            table.add_row(*(Text(row[index]) for index in shown))
        return table


def _model_row(name: str, before: Reading, now: Reading) -> list[str]:
    values, earlier = now.series.get(name, {}), before.series.get(name, {})
    spent_s = now.time_s - before.time_s

    def count(series: str) -> str:
        return f"{values[series]:,.0f}" if series in values else "-"

    def rate(series: str) -> str:
        if spent_s <= 0 or series not in values or series not in earlier:
            return "-"
        return f"{max(0.0, values[series] - earlier[series]) / spent_s:,.1f}"

    usage, looked_up = values.get("kv_cache_usage_perc"), values.get("prefix_cache_queries_total")
    drafted = values.get("spec_decode_num_draft_tokens_total")
    return [
        name,
        now.states[name],
        count("num_requests_running"),
        count("num_requests_waiting"),
        count("num_requests_swapped"),
        "-" if usage is None else f"{usage:.0%}",
        count("kv_blocks_held"),
        rate("prompt_tokens_total"),
        rate("generation_tokens_total"),
        f"{values['prefix_cache_hits_total'] / looked_up:.0%}" if looked_up else "-",
        f"{drafted:,.0f}" if drafted else "-",
        f"{values['spec_decode_num_accepted_tokens_total'] / drafted:.0%}" if drafted else "-",
    ]


def _request_row(request: dict[str, Any]) -> list[str]:
    reason = f" ({request['waits_for']})" if request.get("waits_for") else ""
    return [
        request["id"],
        request["model"],
        request["state"] + reason,
        request.get("owner") or "-",
        f"{request['age_s']:.1f}s",
        f"{request['waited_s']:.1f}s",
        f"{request['prompt_tokens']:,}",
        f"{request['tokens']:,}",
        f"{sum(choice['blocks'] for choice in request['choices']):,}",
    ]
