"""Draws what `octavo top` shows: a row for each model, and one for each request."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from octavo.cli.top_reading import Reading

MODEL_COLUMNS = (
    "model",
    "state",
    "run",
    "wait",
    "swap",
    "KV",
    "blocks",
    "in t/s",
    "out t/s",
    "cached",
)
REQUEST_COLUMNS = ("request", "model", "state", "key", "age", "waited", "prompt", "new", "blocks")
NUM_TEXT_COLUMNS = {"model": 2, "request": 4}
"""Columns of text at the left of each table; the rest are numbers."""
MIN_TEXT_WIDTH = 7
"""Least width of these in a narrow terminal, where they take several lines."""


def view_of(before: Reading, now: Reading) -> RenderableType:
    """Returns the view of a reading; rates are those since the one before."""
    models = _table(MODEL_COLUMNS)
    for name in now.states:
        models.add_row(*map(Text, _model_row(name, before, now)))
    requests = _table(REQUEST_COLUMNS)
    for request in now.requests:
        requests.add_row(*map(Text, _request_row(request)))
    listed = requests if now.requests else Text(now.note or "no request waits or runs")
    return Group(Text(now.url, style="bold"), models, listed)


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        is_text = index < NUM_TEXT_COLUMNS[columns[0]]
        table.add_column(
            column,
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold",
            min_width=MIN_TEXT_WIDTH if is_text else None,
        )
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
