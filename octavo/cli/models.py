"""`octavo models`: lists supported and cached models; with a model, as `octavo show`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from octavo.config.sizes import format_bytes

WIDTH = 14
"""Width of the column of names."""

SHORT_NAME_WIDTH = 17
"""Width of the column of short names; the longest has 15 characters."""

FAMILY_WIDTH = 18
"""Width of the column of families; the longest has 16 characters."""


def models(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Short name, path (config.json suffices) or Hugging Face repository to describe"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """List families, formats, short names and cached models; with a model, as `octavo show`."""
    if model is not None:
        from octavo.cli.show import show

        return show(model, json=json)
    if json:
        import json as json_format

        print(json_format.dumps(_listing()))
    else:
        print("\n".join(_list_lines()))


def _listing() -> dict[str, Any]:
    from octavo.wiring.survey import cached_repositories, families, formats, short_names

    return {
        "short_names": [
            row._asdict() | {"path": None if row.path is None else str(row.path)}
            for row in short_names()
        ],
        "cached": [{"name": name, "bytes": size} for name, size in cached_repositories()],
        "families": [
            {
                "model_type": row.model_type,
                "models": row.family.models,
                "kind": row.family.kind,
                "native": row.family.native,
                "gguf": list(row.architectures),
            }
            for row in families()
        ],
        "formats": dict(formats()),
    }


def _list_lines() -> Iterator[str]:
    from octavo.wiring.survey import cached_repositories, families, formats, short_names

    yield "short names"
    for known in short_names():
        state = "fetched" if known.path else f"octavo pull {known.name}"
        size = format_bytes(known.num_bytes)
        yield f"  {known.name:<{SHORT_NAME_WIDTH}}{known.text} ({known.license}), {size}: {state}"
    cached = list(cached_repositories())
    if cached:
        yield "Hugging Face repositories in the cache"
        for name, num_bytes in cached:
            yield f"  {name}, {format_bytes(num_bytes)}"
    yield "families (every one runs on torch and reference)"
    for row in families():
        backends = "native" if row.family.native else "torch"
        gguf = f"; GGUF {', '.join(row.architectures)}" if row.architectures else ""
        kind = "" if row.family.kind == "decoder" else f", {row.family.kind}"
        yield f"  {row.model_type:<{FAMILY_WIDTH}}{backends:<8}{row.family.models}{kind}{gguf}"
    yield "formats"
    for name, text in formats():
        yield f"  {name:<{WIDTH}}{text}"
