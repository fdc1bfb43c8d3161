"""Converts StructuredOutputs to a GrammarSpec that compiles, or raises an error.

Runs in the frontend process, on request validation threads. Its work is bounded by the input's size
and the compiler's limits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from octavo.api.errors import InvalidRequest
from octavo.api.structured_outputs import GrammarSpec, StructuredOutputs
from octavo.text.grammar import lark
from octavo.text.grammar.closed_objects import close_objects
from octavo.text.grammar.compiler import (
    GrammarCompiler,
    GrammarError,
    fault_in,
    grammar_error,
    probe,
)
from octavo.text.grammar.schema import (
    MAX_BYTES,
    OPTIONS,
    SchemaError,
    check_chains,
    check_cycles,
    prepare_schema,
    read,
    schemas_in,
)
from octavo.text.grammar.schema_faults import blame
from octavo.text.grammar.strings import escape_options, rewrite_patterns
from octavo.text.unicode import check_unicode

WHITESPACE = r"[\x20\x0A\x0D\x09]{0,8}"
"""Pattern of optional whitespace between JSON tokens; bounded, so that output cannot be endless
whitespace.
"""
MAX_TAGS = 256
"""Maximum number of structures in a structural tag."""
MAX_RULE_DEPTH = 200
"""Maximum length of a chain of rule references; llguidance's error messages grow with its cube."""

Grammar = dict[str, Any]
"""A grammar in llguidance's format: a name and a JSON schema or Lark text."""


def admit(outputs: StructuredOutputs, compiler: GrammarCompiler) -> GrammarSpec:
    """Returns the grammar of a structured output request; raises InvalidRequest if it cannot be
    compiled.
    """
    check_unicode(outputs.starts_after, outputs.given_as)
    check_unicode(outputs.begins_with, outputs.given_as)
    try:
        grammars = _grammars(outputs, compiler)
    except SchemaError as error:
        raise grammar_error(outputs.given_as, f"{outputs.kind}: {error}") from None
    text = json.dumps(grammars, ensure_ascii=False, separators=(",", ":"))
    spec = GrammarSpec(
        outputs.kind,
        text,
        starts_after=outputs.starts_after,
        begins_with=outputs.begins_with,
        most_tokens_before=outputs.most_tokens_before,
        may_end_before=outputs.may_end_before,
    )
    try:
        probe(compiler.compile(spec))
    except GrammarError as error:
        faults = [find_schema_error(one) for one in grammars if "json_schema" in one]
        found = next((fault for fault in faults if fault is not None), error)
        raise grammar_error(outputs.given_as, f"{outputs.kind}: {found}") from None
    return spec


def _grammars(outputs: StructuredOutputs, compiler: GrammarCompiler) -> list[Grammar]:
    if outputs.or_structural_tag is None:
        return _own_grammars(outputs, compiler)
    calls = StructuredOutputs(
        structural_tag=outputs.or_structural_tag,
        disable_additional_properties=outputs.disable_additional_properties,
        given_as="tools",
    )
    own = _own_grammars(outputs, compiler)[0] | {"name": "own"}
    either = {"name": "either", "lark_grammar": "start: @own | @answer\n"}
    return [either, own, *_tag_grammars(calls, compiler)]


def _own_grammars(outputs: StructuredOutputs, compiler: GrammarCompiler) -> list[Grammar]:
    if outputs.structural_tag is not None:
        return _tag_grammars(outputs, compiler)
    if outputs.json is not None or outputs.json_object is not None:
        schema = {"type": "object"} if outputs.json is None else outputs.json
        return [_json(outputs, schema, "answer", spaced=outputs.disable_any_whitespace is None)]
    return [{"name": "answer", "lark_grammar": _lark(outputs)}]


def _json(outputs: StructuredOutputs, given: Any, name: str, *, spaced: bool = False) -> Grammar:
    """Returns the grammar of a schema's JSON.

    `spaced` formats like `json.dumps`: one line, with a space after commas and colons. Small models
    fail with free whitespace.
    """
    schema = prepare_schema(read(given))
    if outputs.disable_additional_properties is not False:
        close_objects(schema)
    check_cycles(schema)
    rewrite_patterns(schema)
    options = json_options(outputs, spaced=spaced) | escape_options(schema)
    return {"name": name, "json_schema": schema | {OPTIONS: options}}


def json_options(outputs: StructuredOutputs, *, spaced: bool = False) -> dict[str, Any]:
    """Returns llguidance's options for a schema.

    By default JSON is on one line; tool-call arguments may omit the spaces that `spaced` requires.
    """
    pattern = outputs.whitespace_pattern
    if outputs.disable_any_whitespace is False:
        pattern = pattern or WHITESPACE
    space = "" if pattern or outputs.disable_any_whitespace else " " if spaced else " ?"
    return {
        "item_separator": f",{space}",
        "key_separator": f":{space}",
        "whitespace_flexible": pattern is not None,
        "whitespace_pattern": pattern,
        "coerce_one_of": False,
        "lenient": False,
    }


def _lark(outputs: StructuredOutputs) -> str:
    if outputs.choice is not None:
        for text in outputs.choice:
            check_unicode(text, outputs.given_as)
        _check_length(outputs, sum(map(len, outputs.choice)))
        return lark.choice(outputs.choice)
    text = str(outputs.grammar if outputs.regex is None else outputs.regex)
    check_unicode(text, outputs.given_as)
    _check_length(outputs, len(text))
    if outputs.regex is not None:
        made: str = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        return made
    try:
        made = str(any_to_lark(text))
    except (RecursionError, Exception) as error:  # the converter may raise any error
        raise grammar_error(outputs.given_as, f"grammar: cannot be parsed: {error}"[:500]) from None
    for schema in schemas_in(text):
        check_chains(schema)
    if (depth := lark.depth(made)) > MAX_RULE_DEPTH:
        raise grammar_error(
            outputs.given_as,
            f"grammar: {depth:,} nested rules, expected at most {MAX_RULE_DEPTH}",
        )
    return made


def _check_length(outputs: StructuredOutputs, num_chars: int) -> None:
    if num_chars > MAX_BYTES:
        raise grammar_error(
            outputs.given_as,
            f"{outputs.kind}: got {num_chars:,} characters, expected at most {MAX_BYTES:,}",
        )


def find_schema_error(grammar: Grammar) -> SchemaError | None:
    """Returns the location of a compile error in a schema; None if it cannot be located."""
    options = grammar["json_schema"][OPTIONS]

    def check(schema: dict[str, Any]) -> str:
        whole = {"grammars": [{"name": "part", "json_schema": schema | {OPTIONS: options}}]}
        return fault_in(json.dumps(whole))

    schema = {key: value for key, value in grammar["json_schema"].items() if key != OPTIONS}
    return blame(schema, check) if check(schema) else None


# -- structural tags -------------------------------------------------------------------------------


def _tag_grammars(outputs: StructuredOutputs, compiler: GrammarCompiler) -> list[Grammar]:
    """Returns the grammar of free text with tags, followed by the grammars of the tags'
    contents.
    """
    structures = _structures(outputs)
    bodies = [
        _body(outputs, structure, f"body_{index}") for index, structure in enumerate(structures)
    ]
    names = [body["name"] for body in bodies]
    tag = read(outputs.structural_tag or {})
    layout = lark.TagLayout(
        at_least_one=tag.get("at_least_one") is True,
        stop_after_first=tag.get("stop_after_first") is True,
        begins_unlike=outputs.begins_with,
    )
    special = compiler.special_tokens
    if outputs.frame is not None:
        if not lark.has_marks(outputs.frame, special):
            raise grammar_error(
                outputs.given_as,
                f"the model has no special tokens for {outputs.frame.opening!r} and"
                f" {outputs.frame.text!r}, which separate its messages",
                "set another format with --tool-call-parser",
            )
        whole = lark.build_message_grammar(structures, names, special, outputs.frame, layout)
    else:
        whole = lark.tags(structures, names, special, layout)
    return [{"name": "answer", "lark_grammar": whole}, *bodies]


def _structures(outputs: StructuredOutputs) -> list[dict[str, Any]]:
    tag = read(outputs.structural_tag or {})
    structures: Any = tag.get("structures")
    triggers = tag.get("triggers")
    for name in ("at_least_one", "stop_after_first"):
        if not isinstance(tag.get(name, False), bool):
            raise _bad_tag(outputs, f"{name} is true or false")
    if not _is_list(structures, dict) or not _is_list(triggers, str):
        raise _bad_tag(outputs, "expected structures and triggers, lists of at least one")
    if len(structures) > MAX_TAGS:
        raise _bad_tag(outputs, f"got {len(structures)} structures, expected at most {MAX_TAGS}")
    return [_structure(outputs, one, triggers) for one in structures]


def _structure(
    outputs: StructuredOutputs, structure_fields: Mapping[str, Any], triggers: Any
) -> dict[str, Any]:
    unknown = sorted(set(structure_fields) - {"begin", "end", "schema", "grammar", "regex"})
    if unknown:
        raise _bad_tag(
            outputs, f"a structure has the keys begin, schema and end; got {unknown[0]!r}"
        )
    begin, end = structure_fields.get("begin"), structure_fields.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise _bad_tag(outputs, "begin and end must be strings")
    trigger = next((one for one in triggers if one and begin.startswith(one)), None)
    if trigger is None:
        raise _bad_tag(outputs, f"no trigger is a prefix of {begin[:80]!r}")
    for text in (begin, end):
        check_unicode(text, outputs.given_as)
    return {**structure_fields, "begin": begin, "end": end, "trigger": trigger}


def _body(outputs: StructuredOutputs, structure: Mapping[str, Any], name: str) -> Grammar:
    """Returns the grammar between a structure's begin and end."""
    kinds = [kind for kind in ("schema", "grammar", "regex") if kind in structure]
    if len(kinds) != 1:
        raise _bad_tag(outputs, "a structure has exactly one of schema, grammar, regex")
    if kinds == ["schema"]:
        return _json(outputs, structure["schema"], name)
    part = StructuredOutputs(**{kinds[0]: structure[kinds[0]], "given_as": outputs.given_as})
    return {"name": name, "lark_grammar": _lark(part)}


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, kind) for one in value)


def _bad_tag(outputs: StructuredOutputs, message: str) -> InvalidRequest:
    return grammar_error(outputs.given_as, f"structural_tag: {message}")
