"""`octavo serve [MODEL ...]`: an OpenAI-compatible server with an engine for each model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.common.flags import with_engine_flags, with_flags
from octavo.cli.common.serve_config import ServeConfig, read_config
from octavo.config.option import get_options
from octavo.server.settings import ServerSettings

KEY_VARIABLE = "OCTAVO_API_KEY"
OPERATOR_VARIABLE = "OCTAVO_OPERATOR_KEY"


@with_flags("settings", get_options(ServerSettings))
@with_engine_flags(without=("model",))
def serve(
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Short name, path or Hugging Face repository, or NAME=MODEL",
            show_default="smollm2",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="Load options and models from this YAML file",
            metavar="FILE",
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the chosen options with reasons, and exit")
    ] = False,
    options: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Serve models with an OpenAI-compatible HTTP API. Stops on SIGTERM or Ctrl-C."""
    file = ServeConfig() if config is None else read_config(Path(config))
    settings = file.settings | settings
    if settings.get("strict"):
        options = {"strict_files": True} | options
    specs = file.specs(models or [], options)
    if explain:
        from octavo.cli.common.explained_fit import explain_fit

        for spec in specs:
            print("\n".join(explain_fit(spec.options)))
        return
    from octavo.server.run import serve as run_server

    run_server(specs, _settings(settings), file.engine_defaults(options))


def _settings(values: dict[str, Any]) -> ServerSettings:
    """Returns the settings; keys also come from environment variables, which other users cannot
    read.
    """
    keys = (*values.get("api_key", ()), *filter(None, [os.environ.get(KEY_VARIABLE)]))
    operator_key = values.get("operator_key") or os.environ.get(OPERATOR_VARIABLE) or None
    return ServerSettings(**{**values, "api_key": keys, "operator_key": operator_key})
