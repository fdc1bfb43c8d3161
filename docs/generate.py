"""Writes docs/reference/ from the code that it describes: options, commands, errors, HTTP routes,
metrics, sampling; and the table of families in docs/guides/models.md.

    python docs/generate.py

Run it after a change of any of these; tests/arch/test_docs.py fails where a page is not what this
writes.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from model_tables import GUIDE, guide
from sampling_page import sampling
from tables import table

from octavo import errors
from octavo.cli.app import build_app
from octavo.cli.exit_codes import CALLERS_FAULT, ENGINES_FAULT, INTERRUPTED, OUTPUT_CLOSED
from octavo.config.engine_config import OptionField, option_fields, options_of
from octavo.server.anthropic.bodies import CountTokensBody, MessagesBody
from octavo.server.app import create_app
from octavo.server.cohere.bodies import CohereChatBody
from octavo.server.errors import TABLE
from octavo.server.fields import described
from octavo.server.ollama.bodies import OllamaChatBody, OllamaGenerateBody, ShowBody
from octavo.server.ollama.embeddings import OllamaEmbedBody, OllamaEmbeddingsBody
from octavo.server.openai.batches import BatchBody
from octavo.server.openai.bodies import ChatBody, CompletionBody, SamplingBody
from octavo.server.openai.embeddings import EmbeddingBody
from octavo.server.openai.responses.body import ResponseBody
from octavo.server.routes.cache import PinBody, ResetBody
from octavo.server.routes.jobs import GenerateBody
from octavo.server.routes.model_loading import OPTIONS, LoadBody, UnloadBody
from octavo.server.routes.requests import ChangeBody, ForkBody
from octavo.server.routes.tokenize import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from octavo.server.settings import ServerSettings
from octavo.server.state.metrics import COUNTERS, GAUGES, READINESS
from octavo.server.state.model_metrics import HISTOGRAMS
from octavo.server.state.slot import EngineSlot
from octavo.structured_outputs import StructuredOutputs
from octavo.text.grammar.admission import fault_of, json_options
from octavo.text.grammar.schema import OPTIONS as OPTIONS_KEY
from octavo.text.grammar.schema import prepared
from octavo.text.parsers.formats import DEFAULT_TOOL_FORMAT, REASONING_FORMATS, TOOL_FORMATS

FOLDER = Path(__file__).parent / "reference"
NOTICE = "<!-- Written by docs/generate.py from the code. Do not edit. -->"

SECTIONS = {
    "model": "Model",
    "cache": "KV cache",
    "scheduler": "Scheduler",
    "backend": "Backend",
    "observe": "Observing",
}
BODIES = {
    "POST /v1/completions": CompletionBody,
    "POST /v1/chat/completions": ChatBody,
    "POST /generate": GenerateBody,
    "POST /v1/requests/{request_id}/fork": ForkBody,
}
OTHER_BODIES = {
    "POST /tokenize": TokenizeBody,
    "POST /detokenize": DetokenizeBody,
    "POST /apply-template": ApplyTemplateBody,
    "POST /v1/responses": ResponseBody,
    "POST /v1/batches": BatchBody,
    "POST /v1/cache/pin": PinBody,
    "POST /v1/cache/reset": ResetBody,
    "PATCH /v1/requests/{request_id}": ChangeBody,
    "POST /v1/models/load": LoadBody,
    "POST /v1/models/unload": UnloadBody,
    "POST /v1/messages": MessagesBody,
    "POST /v1/messages/count_tokens": CountTokensBody,
    "POST /api/chat": OllamaChatBody,
    "POST /api/generate": OllamaGenerateBody,
    "POST /v1/embeddings": EmbeddingBody,
    "POST /api/embed": OllamaEmbedBody,
    "POST /api/embeddings": OllamaEmbeddingsBody,
    "POST /api/show": ShowBody,
    "POST /v2/chat": CohereChatBody,
}


def pages() -> dict[str, str]:
    """Returns each page's text by its file name."""
    found = {
        "options.md": options(),
        "cli.md": cli(),
        "errors.md": errors_page(),
        "http.md": http(),
        "metrics.md": metrics(),
        "formats.md": formats(),
        "json-schema.md": json_schema(),
        "sampling.md": sampling(),
    }
    return {name: f"{NOTICE}\n\n{_filled(text)}\n" for name, text in found.items()}


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
        "# Formats of calls and reasoning",
        "## Calls",
        "Names for `--tool-call-parser`. Without it, the first row whose marks the model's chat"
        f" template shows; `{DEFAULT_TOOL_FORMAT}` where it shows none.",
        table(("name", "models", "a call, as a grammar writes it"), calls),
        "## Reasoning",
        "Names for `--reasoning-parser`; `none` reads no reasoning.",
        table(("names", "models", "tags"), tags),
        "How they are used: [tools and reasoning](../guides/tools.md).",
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
            "As keywords of `LLM(...)` and `AsyncLLM.from_options(...)`, and as flags of every"
            " command that starts an engine. In Python an option is written with underscores, in a"
            " shell with dashes. Bytes may be written 2GiB or 500MB, counts 8k (8,000) or 8K"
            " (8,192)."
        ),
    ]
    for section, title in SECTIONS.items():
        specs = {name: spec for name, spec in option_fields().items() if spec.section == section}
        parts += [f"## {title}", option_table(specs)]
    parts += [
        "## Server",
        "Flags of `octavo serve` only.",
        option_table(options_of(ServerSettings)),
    ]
    return "\n\n".join(parts)


def option_table(specs: dict[str, OptionField]) -> str:
    return table(
        ("option", "flag", "allowed", "default", "what it does"),
        (
            (f"`{name}`", f"`{flag_of(name, spec)}`", allowed(spec), default_of(spec), spec.help)
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
    kind = "bytes" if unit == "bytes" else "number" if spec.number is float else "whole number"
    return kind + ("" if low is None else f" from {low} up")


def default_of(spec: OptionField) -> str:
    default = spec.entry.default
    if default is None or default == ():
        return ""
    return ("on" if default else "off") if isinstance(default, bool) else f"`{default}`"


# -- commands --------------------------------------------------------------------------------------


def cli() -> str:
    exits = (
        f"Exit codes: 0 done; {CALLERS_FAULT} the caller's fault (an option, a file, a request);"
        f" {ENGINES_FAULT} the engine's fault; {INTERRUPTED} Ctrl-C; {OUTPUT_CLOSED} the reader of"
        " the output has gone. Errors are one message and a hint on stderr."
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
    """Describes a command's own arguments and flags; the engine's and the server's have a page of
    their own.
    """
    shared = option_fields() | options_of(ServerSettings)
    own = [param for param in command.params if not is_made_of(shared.get(param.name), param.help)]
    yield f"## {path}"
    yield command.help
    if own:
        yield table(
            ("argument or flag", "what it does"),
            ((f"`{', '.join(param.opts)}`", param.help) for param in own),
        )
    if len(own) < len(command.params):
        serves = any(param.name == "port" for param in command.params)
        yield f"And the [options](options.md) of the engine{' and the server' if serves else ''}."


def is_made_of(spec: OptionField | None, text: str) -> bool:
    """Returns whether a flag was made of this option (octavo/cli/flags.py) and is no command's own
    flag.
    """
    return spec is not None and text.lower().startswith(spec.help.lower())


# -- errors ----------------------------------------------------------------------------------------


def errors_page() -> str:
    intro = (
        "Every error that a user can meet is one of these (`octavo/errors.py`). A message says what"
        " was wrong, what was got and what is allowed; a `hint` says what to do. Over HTTP the body"
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
    paths = create_app(EngineSlot()).openapi()["paths"]
    routes = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    parts = [
        "# HTTP",
        (
            "A field that is null counts as not given. A field that is not listed is refused by"
            " name with 400, or, with `--lenient`, ignored and named in the response header"
            " `X-Octavo-Ignored-Fields`."
        ),
        table(("route", "body"), ((f"`{route}`", body_link(route)) for route in routes)),
        "## Fields of every body that asks for text",
        field_table(SamplingBody, ()),
    ]
    for route, body in BODIES.items():
        parts += [f"## {route}", field_table(body, SamplingBody.model_fields)]
    for route, body in OTHER_BODIES.items():
        parts += [f"## {route}", field_table(body, ())]
        if body is LoadBody:
            names = ", ".join(f"`{name}`" for name in OPTIONS)
            parts.append(f"`options` may hold, for the new engine alone: {names}.")
    return "\n\n".join(parts)


def body_link(route: str) -> str:
    return "the fields below" if route in BODIES | OTHER_BODIES else ""


def field_table(body: Any, without: Iterable[str]) -> str:
    own = [row for name, row in described(body).items() if name not in without]
    head = ["field", "what it takes", "what it does"]
    rows = [(f"`{row['name']}`", takes(row), meaning(row)) for row in own]
    if not any(text for *_, text in rows):
        head, rows = head[:2], [row[:2] for row in rows]
    return table(head, rows)


def takes(row: dict[str, Any]) -> str:
    """Returns what a field takes, in the words of its row or of its type."""
    words = {"boolean": "true or false", "array": "a list of objects", "string": "a text"}
    return row["takes"] or words.get(str(row["type"]), "an object")


def meaning(row: dict[str, Any]) -> str:
    """Returns what a field does and what it goes with."""
    parts = [row["help"]]
    parts += [f"needs `{name}`" for name in row.get("needs", ())]
    parts += [f"not with `{name}`: {reason}" for name, reason in row.get("excludes", {}).items()]
    return "; ".join(part for part in parts if part)


# -- metrics ---------------------------------------------------------------------------------------


def metrics() -> str:
    intro = (
        "`GET /metrics` in Prometheus' text form. Each series has the prefix `octavo:` and, for"
        " dashboards that exist, once more `vllm:`. Labels: `model_name`, `engine`; counters end in"
        " `_total`."
    )
    rows = [(f"`{READINESS[0]}`", "gauge", READINESS[1])]
    rows += [(f"`{name}`", "gauge", text) for name, (text, _) in GAUGES.items()]
    rows += [(f"`{name}_total`", "counter", text) for name, (text, _) in COUNTERS.items()]
    rows += [
        (
            "`request_success_total`",
            "counter",
            "Requests by how they ended (label `finished_reason`).",
        )
    ]
    rows += [(f"`{name}`", "histogram", text) for name, (text, _) in HISTOGRAMS.items()]
    return "\n\n".join(["# Metrics", intro, table(("series", "kind", "what it counts"), rows)])


NUMBER, TEXT, LIST, OBJECT = ({"type": kind} for kind in ("number", "string", "array", "object"))
NAMED = OBJECT | {"properties": {"a": NUMBER}}
TWO = [{"type": "string"}, {"type": "null"}]

KEYWORDS: dict[str, dict[str, Any]] = {
    "type": NUMBER,
    "enum": {"enum": [1, "a", None, [1]]},
    "const": {"const": {"a": 1}},
    "$ref": {"$ref": "#/$defs/a", "$defs": {"a": NUMBER}},
    "$defs": {"$ref": "#/$defs/a", "$defs": {"a": NUMBER}},
    "definitions": {"$ref": "#/definitions/a", "definitions": {"a": NUMBER}},
    "$anchor": {"$ref": "#a", "$defs": {"a": {"$anchor": "a"} | NUMBER}},
    "$dynamicRef": {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}}},
    "allOf": {"allOf": [NUMBER, {"minimum": 1}]},
    "anyOf": {"anyOf": TWO},
    "oneOf": {"oneOf": TWO},
    "not": {"not": TEXT},
    "if": {"if": TEXT, "then": TEXT},
    "properties": NAMED,
    "required": NAMED | {"required": ["a"]},
    "additionalProperties": NAMED | {"additionalProperties": TEXT},
    "patternProperties": OBJECT | {"patternProperties": {"^a": NUMBER}},
    "propertyNames": OBJECT | {"propertyNames": {"pattern": "^a"}},
    "minProperties": NAMED | {"minProperties": 1, "additionalProperties": False},
    "maxProperties": NAMED | {"maxProperties": 1, "additionalProperties": False},
    "dependentRequired": OBJECT | {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": OBJECT | {"dependentSchemas": {"a": NAMED}},
    "dependencies": OBJECT | {"dependencies": {"a": ["b"]}},
    "unevaluatedProperties": OBJECT | {"unevaluatedProperties": False},
    "items": LIST | {"items": NUMBER},
    "prefixItems": LIST | {"prefixItems": [NUMBER]},
    "additionalItems": LIST | {"items": [NUMBER], "additionalItems": False},
    "minItems": LIST | {"minItems": 1},
    "maxItems": LIST | {"maxItems": 2},
    "uniqueItems": LIST | {"uniqueItems": True},
    "contains": LIST | {"contains": NUMBER},
    "unevaluatedItems": LIST | {"unevaluatedItems": False},
    "minLength": TEXT | {"minLength": 1},
    "maxLength": TEXT | {"maxLength": 2},
    "pattern": TEXT | {"pattern": "^[a-z]+$"},
    "minimum": NUMBER | {"minimum": 1},
    "maximum": NUMBER | {"maximum": 2},
    "exclusiveMinimum": NUMBER | {"exclusiveMinimum": 1},
    "exclusiveMaximum": NUMBER | {"exclusiveMaximum": 2},
    "multipleOf": {"type": "integer", "multipleOf": 3},
}
"""A schema that uses each keyword."""

FORMATS = (
    "date date-time time duration email hostname ipv4 ipv6 uuid uri uri-reference iri regex"
    " idn-email idn-hostname uri-template byte binary int32 int64 float double password"
)
"""Values of `format` that schemas have."""


def json_schema() -> str:
    """Returns the keywords of JSON schema that answers are held to, found by compiling each."""
    kept = {
        name: not fault_of({"name": "a", "json_schema": _with_options(schema)})
        for name, schema in KEYWORDS.items()
    }
    formats = {
        name: not fault_of({"name": "a", "json_schema": _with_options(TEXT | {"format": name})})
        for name in FORMATS.split()
    }
    rows = [
        (f"`{name}`", "yes" if holds else "refused", NOTES.get(name, ""))
        for name, holds in kept.items()
    ]
    known = ", ".join(f"`{name}`" for name, holds in formats.items() if holds)
    others = ", ".join(f"`{name}`" for name, holds in formats.items() if not holds)
    return "\n\n".join(
        (
            "# JSON schema",
            "The keywords that an answer is held to. A schema with one that is refused is answered"
            " with 400 and the place of the keyword; none is passed over. Words that hold no answer"
            " to anything (`title`, `description`, `default`, `examples` ...) are taken.",
            table(("keyword", "kept", ""), rows),
            f"Values of `format` that are kept: {known}. Refused, with every other: {others}.",
        )
    )


NOTES = {
    "properties": "written in the order of the schema",
    "oneOf": "where types or constants tell the branches apart",
    "pattern": "without look-around and back-references",
    "patternProperties": "where no two patterns match the same name",
    "minProperties": "where all names are listed",
    "maxProperties": "where all names are listed",
    "enum": "numbers as the schema spells them",
    "const": "numbers as the schema spells them",
}
"""Limits of a keyword."""


def _with_options(schema: dict[str, Any]) -> dict[str, Any]:
    form = StructuredOutputs(json=schema)
    return prepared(schema, closes_objects=False) | {OPTIONS_KEY: json_options(form)}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
    GUIDE.write_text(guide())


if __name__ == "__main__":
    main()
