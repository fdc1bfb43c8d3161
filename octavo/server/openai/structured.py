"""Structured output options of OpenAI routes: response_format, vLLM's structured_outputs and the
older guided_* fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.api.errors import InvalidRequest, shown
from octavo.api.structured_outputs import StructuredOutputs
from octavo.server.ignored import IgnoredFields, join_path
from octavo.server.openai.bodies import SamplingBody
from octavo.text.grammar.enforceable import without_unenforced

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Fields of StructuredOutputs by their old names."""

FORMATS = "text, json_object, json_schema, structural_tag"
FORM_FIELDS = tuple(field for field in StructuredOutputs.__struct_fields__ if field != "given_as")
"""Fields allowed in a request's structured_outputs."""
SCHEMA_KEYS = ("name", "description", "schema", "strict")
MAX_NAME = 64
"""Maximum length of a schema's name in characters."""


def parse_structured_outputs(body: SamplingBody) -> StructuredOutputs | None:
    """Returns the structured output options of a body; None for free text. Raises InvalidRequest
    for more than one.
    """
    forms = {name: value for name in GUIDED if (value := getattr(body, name)) is not None}
    for name in ("response_format", "structured_outputs"):
        if (value := getattr(body, name)) is not None:
            forms[name] = value
    if forms.get("response_format", {}).get("type") == "text":
        response_format(forms.pop("response_format"), body.ignored)
    if len(forms) > 1:
        first, second, *_ = forms
        raise InvalidRequest(f"{second}: not supported with {first}", param=second)
    name, value = next(iter(forms.items()), ("", None))
    return None if value is None else _form(body, name, value)


def _form(body: SamplingBody, name: str, value: Any) -> StructuredOutputs | None:
    if name == "response_format":
        return response_format(value, body.ignored)
    if name == "structured_outputs":
        return StructuredOutputs(**_select_known(name, value, FORM_FIELDS, body.ignored))
    pattern = body.guided_whitespace_pattern
    return StructuredOutputs(**{GUIDED[name]: value, "whitespace_pattern": pattern}, given_as=name)


def response_format(
    format_fields: Mapping[str, Any], ignored: IgnoredFields, name: str = "response_format"
) -> StructuredOutputs | None:
    """Parses response_format; returns None for text. `name` is the field's name."""
    kind = format_fields.get("type")
    if kind == "text":
        _select_known(name, format_fields, ("type",), ignored)
        return None
    if kind == "json_object":
        _select_known(name, format_fields, ("type", "schema"), ignored)
        schema = format_fields.get("schema")  # llama.cpp's format
        if not isinstance(schema, dict | None):
            raise InvalidRequest(
                f"{name}.schema: got {shown(schema)}, expected an object", param=name
            )
        if not schema:
            return StructuredOutputs(json_object=True, given_as=name)
        schema = _without_unenforced(schema, f"{name}.schema", ignored)
        return StructuredOutputs(json=schema, given_as=name)
    if kind == "json_schema":
        if (
            format_fields.get("json_schema") is None and "schema" in format_fields
        ):  # also llama.cpp's format
            format_fields = {"type": kind, "json_schema": {**format_fields, "type": None}}
        _select_known(name, format_fields, ("type", "json_schema"), ignored)
        schema = _schema(format_fields.get("json_schema"), name, ignored)
        return StructuredOutputs(json=schema, given_as=name)
    if kind == "structural_tag":
        tag = _select_known(name, format_fields, ("type", "structures", "triggers"), ignored)
        return StructuredOutputs(structural_tag=tag, given_as=name)
    raise InvalidRequest(f"{name}: got the type {shown(kind)}, expected {FORMATS}", param=name)


def _schema(json_schema: object, name: str, ignored: IgnoredFields) -> Any:
    """Returns the schema of a json_schema object. Without `strict`, keywords that grammars do not
    enforce are ignored; the rest is always enforced.
    """
    if not isinstance(json_schema, Mapping) or not isinstance(
        json_schema.get("schema"), dict | bool
    ):
        raise InvalidRequest(
            f"{name}: got {shown(json_schema)} as json_schema, expected an object with a name and a"
            " schema",
            param=name,
        )
    _select_known(f"{name}.json_schema", json_schema, SCHEMA_KEYS, ignored)
    label = json_schema.get("name")
    if label is not None and not (isinstance(label, str) and 0 < len(label) <= MAX_NAME):
        reason = f"got {shown(label)}, expected a string of at most {MAX_NAME} characters"
        ignored.add(f"{name}.json_schema.name", reason)
    if not isinstance(json_schema.get("strict"), bool | None):
        raise InvalidRequest(
            f"{name}: got {shown(json_schema['strict'])} as strict, expected true or false",
            param=name,
        )
    schema = json_schema["schema"]
    if json_schema.get("strict") or not isinstance(schema, Mapping):
        return schema
    return _without_unenforced(schema, f"{name}.json_schema.schema", ignored)


def _without_unenforced(
    schema: Mapping[str, Any], name: str, ignored: IgnoredFields
) -> dict[str, Any]:
    """Returns a schema without the keywords that grammars do not enforce, which are reported."""
    unenforced = without_unenforced(schema)
    ignored.add_keywords(unenforced.dropped, name)
    return dict(unenforced.schema)


def _select_known(
    name: str, fields: Mapping[str, Any], allowed: tuple[str, ...], ignored: IgnoredFields
) -> dict[str, Any]:
    """Returns the allowed fields of an object; reports the others as ignored."""
    for key, value in fields.items():
        if key not in allowed and value is not None:
            hint = f"expected {', '.join(allowed)}"
            ignored.add(join_path(name, key), "no such field", hint=hint)
    return {key: value for key, value in fields.items() if key in allowed}
