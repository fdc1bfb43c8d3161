"""`octavo serve [MODEL]`: the OpenAI-compatible server."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from octavo.cli.flags import with_engine_flags, with_flags
from octavo.cli.model import fetched
from octavo.config.engine_config import options_of
from octavo.server.settings import ServerSettings

KEY_VARIABLE = "OCTAVO_API_KEY"


@with_flags("settings", options_of(ServerSettings))
@with_engine_flags(without=("model",))
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Short name, local path or Hugging Face repository.", show_default="smollm2"
        ),
    ] = None,
    options: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Serve a model over HTTP, the way OpenAI's API is spoken. Stops on SIGTERM or Ctrl-C."""
    from octavo.server.run import serve as run_server

    if model is not None:
        options["model"] = model
    run_server(lambda: fetched(options), _settings(settings))


def _settings(given: dict[str, Any]) -> ServerSettings:
    """Returns the settings; keys also come from the environment, which other users cannot see."""
    keys = (*given.get("api_key", ()), *filter(None, [os.environ.get(KEY_VARIABLE)]))
    return ServerSettings(**{**given, "api_key": keys})
