"""`octavo ps`: the models that a server has loaded."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from octavo.cli.top import DEFAULT_URL, KEY_VARIABLES
from octavo.config.sizes import format_bytes

FOREVER_YEAR = 9999
"""Expiry year that Ollama's API reports for models that stay loaded."""
HINT = "check that --url is the address of octavo serve or Ollama"


def ps(
    *,
    url: Annotated[str, typer.Option(help="Query this server (HOST:PORT or URL)")] = DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option(help="Send this API key", show_default=f"${KEY_VARIABLES[1]}")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the models of GET /api/ps as JSON")
    ] = False,
) -> None:
    """List the models loaded by a running server."""
    import msgspec

    from octavo.api.errors import WorkerFailed
    from octavo.cli.common.columns import format_columns
    from octavo.utils.http_client import HttpClient, describe_error, parse_json
    from octavo.utils.progress import to_stderr

    key = api_key or next(filter(None, map(os.environ.get, reversed(KEY_VARIABLES))), None)
    client = HttpClient(url, key)
    answer = client.get("/api/ps")
    if answer.status_code != 200:
        raise WorkerFailed(
            f"url: {client.url}/api/ps returned {describe_error(answer)}",
            hint=HINT,
        )
    try:
        models = parse_json(answer.content)["models"]
        rows = [_row(model) for model in models]
    except (KeyError, TypeError, ValueError) as error:
        raise WorkerFailed(
            f"url: {client.url}/api/ps did not return a list of models",
            hint=HINT,
        ) from error
    if json:
        print(msgspec.json.encode(models).decode())
        return
    print(format_columns(("NAME", "SIZE", "QUANTIZATION", "CONTEXT", "UNTIL"), rows))
    if not rows:
        to_stderr(f"no model is loaded at {client.url}")


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(model["name"]),
        format_bytes(int(model["size"])),
        str(model["details"]["quantization_level"]) or "-",
        f"{model['context_length']:,}" if "context_length" in model else "-",
        _until(str(model["expires_at"])),
    )


def _until(expires_at: str) -> str:
    """Formats the time until an idle model is unloaded."""
    expiry = datetime.fromisoformat(expires_at)
    if expiry.year >= FOREVER_YEAR:
        return "forever"
    left_s = max(0, round((expiry - datetime.now(UTC)).total_seconds()))
    return f"in {left_s} s" if left_s < 120 else f"in {left_s // 60} min"
