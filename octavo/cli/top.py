"""`octavo top`: a live view of a server's queues, KV blocks, speed and running requests."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from octavo.cli.top_reading import ServerReader

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLES = ("OCTAVO_OPERATOR_KEY", "OCTAVO_API_KEY")


def top(
    *,
    url: Annotated[str, typer.Option(help="Query this server (HOST:PORT or URL)")] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Send this API key (operator's: all requests)",
            show_default=f"${KEY_VARIABLES[0]}",
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Refresh every N seconds")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit")] = False,
) -> None:
    """Show live statistics of a server: queues, KV cache, throughput."""
    from octavo.cli.top_reading import ServerReader
    from octavo.utils.http_client import HttpClient

    key = api_key or next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)
    reader = ServerReader(HttpClient(url, key))
    if once or not sys.stdout.isatty():
        _print_once(reader, interval)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            _show_live(reader, interval)


def _print_once(reader: ServerReader, interval: float) -> None:
    """Prints the view once; rates need two readings."""
    from rich.console import Console

    from octavo.cli.top_view import render_view

    before = reader.read()
    time.sleep(interval)
    Console().print(render_view(before, reader.read()))


def _show_live(reader: ServerReader, interval: float) -> None:
    """Updates the view until Ctrl-C; waits for a server that is not reachable."""
    from rich.live import Live

    from octavo.api.errors import Unavailable
    from octavo.cli.top_view import render_view

    before = reader.read()
    with Live(render_view(before, before), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                now = reader.read()
            except Unavailable as error:
                live.update(error.message, refresh=True)
                continue
            live.update(render_view(before, now), refresh=True)
            before = now
