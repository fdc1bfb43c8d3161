"""`octavo route URL ...`: a router in front of several OpenAI-compatible servers."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from octavo.cli.common.flags import with_flags
from octavo.config.option import get_options
from octavo.distributed.router.settings import RouterSettings

KEY_VARIABLE = "OCTAVO_API_KEY"
SERVER_KEY_VARIABLE = "OCTAVO_SERVER_API_KEY"


@with_flags("settings", get_options(RouterSettings))
def route(
    *,
    urls: Annotated[
        list[str],
        typer.Argument(metavar="URL...", help="Servers, as HOST:PORT or http://HOST:PORT."),
    ],
    settings: dict[str, Any],
) -> None:
    """Route requests to several servers by cached prefixes and load."""
    from octavo.distributed.router.run import route as run_router

    keys = (*settings.get("api_key", ()), *filter(None, [os.environ.get(KEY_VARIABLE)]))
    server_key = settings.get("server_api_key") or os.environ.get(SERVER_KEY_VARIABLE) or None
    run_router(urls, RouterSettings(**{**settings, "api_key": keys, "server_api_key": server_key}))
