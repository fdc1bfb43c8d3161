"""`octavo pull NAME`: downloads a model and prints its path."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.config.model_options import DEFAULT_MODEL


def pull(
    name: Annotated[
        str,
        typer.Argument(help="Short name, OWNER/REPO[:QUANT] or OWNER/REPO/FILE.gguf."),
    ] = DEFAULT_MODEL,
) -> None:
    """Download a model into the cache, verify it and print its path."""
    from octavo.checkpoint.catalogue import resolve
    from octavo.utils.progress import to_stderr

    print(resolve(name, progress=True, verify=True, report=to_stderr))
