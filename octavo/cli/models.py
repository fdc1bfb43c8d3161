"""`octavo models`: lists what can be run; `octavo models MODEL`: says what a checkpoint is and
which backend runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.config.sizes import format_bytes

if TYPE_CHECKING:
    from octavo.wiring.survey import ModelReport

WIDTH = 14
"""Columns of the names."""

SHORT_NAME_WIDTH = 17
"""Columns of a short name in the list; the longest has 15."""

FAMILY_WIDTH = 18
"""Columns of a family's name in the list; the longest has 16."""


def models(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Short name, path (config.json suffices) or Hugging Face repository to describe"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """List families, formats, short names and cached models, or describe one model. A model is
    described from its headers, with the backends that run it; the exit code is 2 if none does.
    """
    if model is None:
        _print(_listing() if json else None, _list_lines(), as_json=json)
        return
    from octavo.wiring.survey import report_on

    report = report_on(model)
    _print(_shown(report) if json else None, _report_lines(model, report), as_json=json)
    if not report.runs:
        raise typer.Exit(2)


def _print(found: dict[str, Any] | None, lines: Iterator[str], *, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(found))
    else:
        print("\n".join(lines))


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


def _report_lines(name: str, report: ModelReport) -> Iterator[str]:
    shares = ", ".join(
        f"{kind} {count / report.num_parameters:.0%}" for kind, count in report.formats.items()
    )
    size = f", {format_bytes(report.num_bytes)}" if report.num_bytes else ""
    tokenizer = {True: "with a tokenizer", False: "without a tokenizer", None: "no weights here"}
    template = " and a chat template" if report.has_chat_template else ""
    yield f"{name}: {report.info.model_type}, {report.num_parameters / 1e6:,.1f} M parameters{size}"
    yield f"  stored as     {shares}"
    yield f"  context       {report.info.max_context_tokens:,} tokens"
    yield f"  vocabulary    {report.info.vocab_size:,} tokens"
    yield f"  comes         {tokenizer[report.has_tokenizer]}{template}"
    for verdict in report.verdicts:
        if verdict.refusal is None:
            yield f"  {verdict.backend:<{WIDTH}}runs it"
        else:
            state = "refuses it" if verdict.is_installed else "cannot run here"
            yield f"  {verdict.backend:<{WIDTH}}{state}: {verdict.refusal}"


def _shown(report: ModelReport) -> dict[str, Any]:
    """Returns a report in JSON's types."""
    facts = asdict(report.info)
    return {
        "path": str(report.path),
        **facts,
        "num_parameters": report.num_parameters,
        "formats": report.formats,
        "num_bytes": report.num_bytes,
        "has_tokenizer": report.has_tokenizer,
        "has_chat_template": report.has_chat_template,
        "backends": {each.backend: each.refusal or "runs it" for each in report.verdicts},
    }
