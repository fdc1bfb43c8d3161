"""`octavo show MODEL`: describes a checkpoint from its headers, and the backends that run it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.common.style import format_mark
from octavo.config.sizes import format_bytes

if TYPE_CHECKING:
    from octavo.wiring.survey import ModelReport

WIDTH = 15
"""Width of the name column."""


def show(
    model: Annotated[
        str,
        typer.Argument(help="Short name, path (config.json is enough) or Hugging Face repository"),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object")] = False,
) -> None:
    """Show the metadata of a model and the backends that support it. The exit code is 2 if none
    does.
    """
    from octavo.wiring.survey import make_report

    report = make_report(model)
    if json:
        import json as json_format

        print(json_format.dumps(_to_json(report)))
    else:
        print("\n".join(_lines(model, report)))
    if not report.runs:
        raise typer.Exit(2)


def _lines(name: str, report: ModelReport) -> Iterator[str]:
    shares = ", ".join(
        f"{kind} {count / report.num_parameters:.0%}" for kind, count in report.formats.items()
    )
    size = f", {format_bytes(report.num_bytes)}" if report.num_bytes else ""
    tokenizer = {True: "included", False: "none", None: "unknown (no weights)"}
    has_template: str | None = "included"
    if not report.has_chat_template:
        has_template = None if report.sampling is None else "none (completion only)"
    yield f"{name}: {report.info.model_type}, {report.num_parameters / 1e6:,.1f} M parameters{size}"
    facts = {
        "quantization": shares,
        "context": f"{report.info.max_context_tokens:,} tokens",
        "vocabulary": f"{report.info.vocab_size:,} tokens",
        "tokenizer": tokenizer[report.has_tokenizer],
        "chat template": None if report.has_tokenizer is None else has_template,
        "tool format": report.tool_format,
        "reasoning": report.reasoning_format,
        "sampling": None if report.sampling is None else report.sampling.describe_values(),
        "license": report.license,
    }
    if report.card is not None:
        family, card = report.card
        facts["model card"] = "; ".join(sampling.describe() for sampling in card.sampling) or None
        facts["family"] = f"{card.title}: octavo models {family}"
    for fact, text in facts.items():
        if text is not None:
            yield f"  {fact:<{WIDTH}}{text}"
    for verdict in report.verdicts:
        if verdict.unsupported_reason is None:
            yield f"{format_mark('ok')} {verdict.backend:<{WIDTH}}supported"
        else:
            state = "not supported" if verdict.is_installed else "not available"
            mark = format_mark("failure" if verdict.is_installed else "warning")
            yield f"{mark} {verdict.backend:<{WIDTH}}{state}: {verdict.unsupported_reason}"


def _to_json(report: ModelReport) -> dict[str, Any]:
    sampling = report.sampling
    return {
        "path": str(report.path),
        **asdict(report.info),
        "num_parameters": report.num_parameters,
        "formats": report.formats,
        "num_bytes": report.num_bytes,
        "has_tokenizer": report.has_tokenizer,
        "has_chat_template": report.has_chat_template,
        "tool_format": report.tool_format,
        "reasoning_format": report.reasoning_format,
        "sampling": None if sampling is None else dict(sampling.values),
        "sampling_source": None if sampling is None else sampling.source,
        "license": report.license,
        "family": None if report.card is None else report.card[0],
        "backends": {
            verdict.backend: verdict.unsupported_reason or "runs it" for verdict in report.verdicts
        },
    }
