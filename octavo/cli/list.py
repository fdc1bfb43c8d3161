"""`octavo list`: the models in the caches of this machine."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from octavo.config.sizes import format_bytes


def list(
    *,
    json: Annotated[
        bool, typer.Option("--json", help="Print name, path, bytes and quantization as JSON")
    ] = False,
) -> None:
    """List the models on this machine, newest first."""
    import msgspec

    from octavo.checkpoint.local_models import list_local_models
    from octavo.cli.common.columns import format_columns

    models = list_local_models()
    if json:
        rows_of_json = [
            {
                "name": model.name,
                "path": str(model.path),
                "num_bytes": model.num_bytes,
                "quantization": model.quantization,
                "modified_s": model.modified_s,
            }
            for model in models
        ]
        print(msgspec.json.encode(rows_of_json).decode())
        return
    rows = [
        (
            model.name,
            format_bytes(model.num_bytes),
            model.quantization or "-",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified_s)),
        )
        for model in models
    ]
    print(format_columns(("NAME", "SIZE", "QUANTIZATION", "MODIFIED"), rows))
    if not models:
        from octavo.utils.progress import to_stderr

        to_stderr("no models yet; download the default with `octavo pull smollm2`")
