"""Writes docs/reference/ from the code that it describes: options, commands, errors, HTTP routes,
metrics, sampling; docs/models/ from the family cards; the table of families in
docs/guides/models.md; and the fields of the kernels' sampling record in
csrc/kernels/sampling_fields.h.

    python docs/generate.py

Run it after a change of any of these; tests/arch/test_docs.py fails where a page is not what this
writes.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import typer
from family_pages import FOLDER as MODEL_FOLDER
from family_pages import INDEX, family_page, index_page, page_files
from guarantees_page import guarantees
from model_tables import GUIDE, guide
from sampling_fields import HEADER, sampling_fields
from sampling_page import sampling
from schema_page import json_schema
from tables import table

from octavo.api import errors
from octavo.cli.app import build_app
from octavo.cli.common.exit_codes import CALLERS_FAULT, ENGINES_FAULT, INTERRUPTED, OUTPUT_CLOSED
from octavo.cli.common.flags import flag_help
from octavo.cli.common.help import option_text
from octavo.cli.foreign.foreign_flags import MODEL, ForeignFlag
from octavo.cli.foreign.translate_flags import ROWS
from octavo.config.engine_config import option_fields
from octavo.config.option import Group, OptionField, get_options
from octavo.distributed.router.metrics import COUNTERS as ROUTER_COUNTERS
from octavo.distributed.router.metrics import GAUGES as ROUTER_GAUGES
from octavo.distributed.router.metrics import LABELS as ROUTER_LABELS
from octavo.distributed.router.settings import RouterSettings
from octavo.server.app import ROUTES, create_app
from octavo.server.fields import describe_fields
from octavo.server.http.body import Body
from octavo.server.http.errors import TABLE
from octavo.server.http.openapi import get_bodies
from octavo.server.openai.bodies import SamplingBody
from octavo.server.routes.model_loading import OPTIONS, LoadBody
from octavo.server.settings import ServerSettings
from octavo.server.state.metrics import (
    CACHE,
    CACHE_LABELS,
    COUNTERS,
    GAUGES,
    READINESS,
    REJECTIONS,
    STEP_TOKENS,
)
from octavo.server.state.model_metrics import HISTOGRAMS
from octavo.server.state.slot import EngineSlot
from octavo.text.parsers.formats import DEFAULT_TOOL_FORMAT, REASONING_FORMATS, TOOL_FORMATS

FOLDER = Path(__file__).parent / "reference"
NOTICE = "<!-- Written by docs/generate.py from the code. Do not edit. -->"


def pages() -> dict[str, str]:
    """Returns each page's text by its file name."""
    found = {
        "options.md": options(),
        "cli.md": cli(),
        "foreign-flags.md": foreign_flags(),
        "errors.md": errors_page(),
        "http.md": http(),
        "metrics.md": metrics(),
        "formats.md": formats(),
        "json-schema.md": json_schema(),
        "sampling.md": sampling(),
        "guarantees.md": guarantees(),
    }
    return {name: page(text) for name, text in found.items()}


def page(text: str) -> str:
    return f"{NOTICE}\n\n{_filled(text)}\n"


def _filled(text: str) -> str:
    """Wraps paragraphs at 100 columns; table rows, lists and code stay as they are."""
    return "\n".join(
        line if line.startswith(("|", " ", "-", "#", "```")) else textwrap.fill(line, 100)
        for line in text.split("\n")
    )


# -- formats of answers ----------------------------------------------------------------------------


def formats() -> str:
    """Returns the tables of the formats in which models call functions and reason."""
    calls = [
        (f"`{row.name}`", row.models, _shown("".join((row.written[0], "{...}", row.written[1]))))
        for row in TOOL_FORMATS
    ]
    tags = [
        (
            ", ".join(f"`{name}`" for name in (row.name, *row.aliases)),
            row.models,
            f"{_shown(row.opening)} ... {_shown(row.closing)}",
        )
        for row in REASONING_FORMATS
    ]
    parts = [
        "# Tool-call and reasoning formats",
        "## Tool calls",
        "Names for `--tool-call-parser`. By default, the first format is used whose markers occur"
        f" in the model's chat template, or `{DEFAULT_TOOL_FORMAT}` if there is none.",
        table(("name", "models", "format of a call"), calls),
        "## Reasoning",
        "Names for `--reasoning-parser`; `none` disables the parser.",
        table(("names", "models", "tags"), tags),
        "For their use, see [tools and reasoning](../guides/tools.md).",
    ]
    return "\n\n".join(parts)


def _shown(text: str) -> str:
    """Returns a text as code in one line of a table."""
    return "`" + text.replace("\n", "\u21b5").replace("`", "'") + "`"


# -- options ---------------------------------------------------------------------------------------


def options() -> str:
    parts = [
        "# Options",
        (
            "Set options as keywords of `LLM(...)` and `AsyncLLM.from_options(...)`, or as flags of"
            " every command that starts an engine. Use underscores in Python and dashes in a shell."
            " Sizes accept units such as 2GiB or 500MB, and counts accept 8k (8,000) or 8K (8,192)."
        ),
    ]
    kinds = [
        ("# Engine options", option_fields()),
        ("# Server options, of `octavo serve`", get_options(ServerSettings)),
        ("# Router options, of `octavo route`", get_options(RouterSettings)),
    ]
    for title, every in kinds:
        parts.append(f"#{title}")
        for group in get_args(Group):
            specs = {name: spec for name, spec in every.items() if spec.group == group}
            if specs:
                parts += [f"### {group}", option_table(specs)]
    return "\n\n".join(parts)


def option_table(specs: dict[str, OptionField]) -> str:
    return table(
        ("option", "flag", "allowed", "default", "description"),
        (
            (
                f"`{name}`",
                f"`{flag_of(name, spec)}`",
                allowed(spec),
                default_of(spec),
                f"{spec.help}. {spec.details}".rstrip(),
            )
            for name, spec in specs.items()
        ),
    )


def flag_of(name: str, spec: OptionField) -> str:
    """Returns an option's flag; a switch that is on by default has one that turns it off."""
    flag = name.replace("_", "-")
    return f"--no-{flag}" if spec.type is bool and spec.entry.default else f"--{flag}"


def allowed(spec: OptionField) -> str:
    if spec.choices:
        return ", ".join(f"`{choice}`" for choice in spec.choices)
    if spec.is_list:
        return "text, repeatable"
    if spec.type is bool:
        return "on or off"
    if spec.number is None:
        return "text"
    low, unit = spec.entry.metadata["low"], spec.entry.metadata["unit"]
    kind = "bytes" if unit == "bytes" else "number" if spec.number is float else "integer"
    if unit == "seconds":
        kind = "seconds, or a time such as `5m`"
    return kind + ("" if low is None else f", at least {low}")


def default_of(spec: OptionField) -> str:
    default = spec.entry.default
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{spec.default_text}`" if default not in (None, (), "") else spec.default_text


# -- commands --------------------------------------------------------------------------------------


def cli() -> str:
    exits = (
        f"Exit codes: 0 success; {CALLERS_FAULT} invalid option, file or request;"
        f" {ENGINES_FAULT} engine error; {INTERRUPTED} Ctrl-C; {OUTPUT_CLOSED} closed output pipe."
        " An error prints a message and a hint to stderr."
    )
    root = typer.main.get_command(build_app())
    return "\n\n".join(
        [
            "# Commands",
            exits,
            *(text for command in commands(root, "octavo") for text in describe(*command)),
        ]
    )


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def describe(path: str, command: Any) -> Iterator[str]:
    """Describes a command's own arguments and flags; the engine's, the server's and the router's
    have a page of their own.
    """
    shared = (option_fields(), get_options(ServerSettings), get_options(RouterSettings))
    own = [
        param
        for param in command.params
        if not any(is_made_of(specs.get(param.name), param.help) for specs in shared)
    ]
    yield f"## {path}"
    yield command.help
    if own:
        yield table(
            ("argument or flag", "description"),
            ((f"`{', '.join(param.opts)}`", option_text(param)) for param in own),
        )
    if len(own) < len(command.params):
        names = {param.name for param in command.params}
        if "health_interval_s" in names:
            yield "The [options](options.md) of the router are accepted as well."
            return
        serves = "port" in names
        owners = "the engine and the server" if serves else "the engine"
        yield f"The [options](options.md) of {owners} are accepted as well."


def is_made_of(spec: OptionField | None, text: str) -> bool:
    """Returns whether `cli/common/flags.py` made a flag of this option, so that it is no command's
    own flag.
    """
    return spec is not None and text == flag_help(spec)


# -- flags of other engines ------------------------------------------------------------------------


def foreign_flags() -> str:
    intro = (
        "Octavo's commands accept the flags of llama.cpp's server, `vllm serve` and Ollama that"
        " have a counterpart. Other flags are ignored with a message, or rejected with the option"
        " to use instead. Flags of the same name are not listed."
    )
    rows = [
        (", ".join(f"`{name}`" for name in row.names), row.engine, counterpart(row)) for row in ROWS
    ]
    return "\n\n".join(
        ["# Flags of other engines", intro, table(("flag", "engine", "in Octavo"), rows)]
    )


def counterpart(row: ForeignFlag) -> str:
    """Returns what a row makes of its flags."""
    if row.is_refused:
        return f"rejected: {row.text}"
    made = [flag for flag in (row.target, *row.extra) if flag]
    if not made:
        return f"ignored: {row.text}"
    return " ".join("the model" if flag == MODEL else f"`{flag}`" for flag in made)


# -- errors ----------------------------------------------------------------------------------------


def errors_page() -> str:
    intro = (
        "Octavo raises these errors (`octavo/api/errors.py`). A message names the field, the value"
        " received and the allowed values; a `hint` suggests a solution. The body of an HTTP error"
        ' is `{"error": {"message", "type", "param", "code"}}`.'
    )
    rows = [
        (
            f"`{kind.__name__}`",
            f"`{kind.__bases__[0].__name__}`",
            *over_http(kind),
            exit_code(kind),
            first_line(kind),
        )
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.OctavoError)
    ]
    return "\n\n".join(
        [
            "# Errors",
            intro,
            table(("error", "is a", "HTTP", "type over HTTP", "exit code", "when"), rows),
        ]
    )


def over_http(kind: type[Exception]) -> tuple[str, str]:
    found = next(
        ((str(status), f"`{name}`") for known, status, name in TABLE if issubclass(kind, known)),
        None,
    )
    return found or ("", "")


def exit_code(kind: type[Exception]) -> str:
    if kind is errors.OctavoError:
        return ""
    return str(
        CALLERS_FAULT if issubclass(kind, errors.ClientError | errors.SetupError) else ENGINES_FAULT
    )


def first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").splitlines()[0]


# -- HTTP ------------------------------------------------------------------------------------------


def http() -> str:
    paths = create_app(EngineSlot(), ServerSettings(training_routes=True)).openapi()["paths"]
    routes = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    bodies = _bodies()
    parts = [
        "# HTTP",
        (
            "A field that is null counts as not set. Unknown fields, at any depth, are ignored and"
            " named in the response header `X-Octavo-Ignored`; with `--strict` they are rejected"
            " with 400. Operator routes (cache, loading of models, changes of running requests) are"
            " always strict."
        ),
        table(
            ("route", "body"),
            ((f"`{route}`", "the fields below" if route in bodies else "") for route in routes),
        ),
        "## Common fields of generation requests",
        field_table(SamplingBody, ()),
    ]
    for body, its_routes in _routes_by_body(routes).items():
        asks_for_text = issubclass(body, SamplingBody)
        parts.append(f"## {', '.join(its_routes)}")
        parts.append(field_table(body, SamplingBody.model_fields if asks_for_text else ()))
        if body is LoadBody:
            names = ", ".join(f"`{name}`" for name in OPTIONS)
            parts.append(f"`options` applies to the new engine only. Allowed options: {names}.")
    return "\n\n".join(parts)


def _routes_by_body(routes: Iterable[str]) -> dict[type[Body], list[str]]:
    """Returns the routes that take each body, in the order of `routes`."""
    found: dict[type[Body], list[str]] = {}
    bodies = _bodies()
    for route in routes:
        if route in bodies:
            found.setdefault(bodies[route], []).append(route)
    return found


def _bodies() -> dict[str, type[Body]]:
    return {route: body for part in ROUTES for route, body in get_bodies(part.router).items()}


def field_table(body: Any, without: Iterable[str]) -> str:
    own = [row for name, row in describe_fields(body).items() if name not in without]
    head = ["field", "allowed", "description"]
    rows = [(f"`{row['name']}`", takes(row), meaning(row)) for row in own]
    if not any(text for *_, text in rows):
        head, rows = head[:2], [row[:2] for row in rows]
    return table(head, rows)


def takes(row: dict[str, Any]) -> str:
    """Returns what a field takes, in the words of its row or of its type."""
    words = {"boolean": "true or false", "array": "a list of objects", "string": "a string"}
    return row["takes"] or words.get(str(row["type"]), "an object")


def meaning(row: dict[str, Any]) -> str:
    """Returns what a field does and what it goes with."""
    parts = [row["help"]]
    parts += [f"requires `{name}`" for name in row.get("needs", ())]
    parts += [f"not with `{name}`: {reason}" for name, reason in row.get("excludes", {}).items()]
    return "; ".join(part for part in parts if part)


# -- metrics ---------------------------------------------------------------------------------------


def metrics() -> str:
    labels = ", ".join(f"`{label}`" for label in CACHE_LABELS)
    intro = (
        "`GET /metrics` returns the metrics in the Prometheus text format. Each series is exported"
        " with the prefix `octavo:` and, for existing dashboards, with `vllm:`. Labels:"
        " `model_name`, `engine`; counters end in `_total`."
    )
    rows = [(f"`{READINESS[0]}`", "gauge", READINESS[1])]
    rows += [(f"`{name}`", "gauge", text) for name, (text, _) in GAUGES.items()]
    rows += [(f"`{name}_total`", "counter", text) for name, (text, _) in COUNTERS.items()]
    rows += [
        (
            "`request_success_total`",
            "counter",
            "Number of finished requests, by finish reason (label `finished_reason`).",
        )
    ]
    rows += [(f"`{CACHE[0]}`", "gauge", f"{CACHE[1]} (labels {labels})")]
    rows += [(f"`{REJECTIONS[0]}_total`", "counter", f"{REJECTIONS[1]} (label `reason`)")]
    histograms = [STEP_TOKENS, *((name, text) for name, (text, _) in HISTOGRAMS.items())]
    rows += [(f"`{name}`", "histogram", text) for name, text in histograms]
    head = ("series", "kind", "description")
    return "\n\n".join(["# Metrics", intro, table(head, rows), *router_metrics()])


def router_metrics() -> list[str]:
    intro = (
        "`octavo route` exports its own series at `GET /metrics`, with the prefix `octavo:router_`."
    )
    rows = [(f"`{name}`", "gauge", "`server`", text) for name, (text, _) in ROUTER_GAUGES.items()]
    rows += [
        (
            f"`{name}_total`",
            "counter",
            ", ".join(f"`{label}`" for label in ROUTER_LABELS.get(name, ())),
            text,
        )
        for name, text in ROUTER_COUNTERS.items()
    ]
    return ["## Router", intro, table(("series", "kind", "labels", "description"), rows)]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
    MODEL_FOLDER.mkdir(exist_ok=True)
    (MODEL_FOLDER / INDEX).write_text(page(index_page()))
    for name, file in page_files().items():
        (MODEL_FOLDER / file).write_text(page(family_page(name)))
    GUIDE.write_text(guide())
    HEADER.write_text(sampling_fields())


if __name__ == "__main__":
    main()
