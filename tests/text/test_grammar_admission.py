"""Forms of answers are admitted with a grammar that says what they say, or refused with the place
of the fault.
"""

import json
import time

import pytest

from octavo.api.errors import InvalidRequest
from octavo.api.structured_outputs import GrammarSpec, StructuredOutputs
from octavo.text.grammar.compiler import GrammarCompiler, GrammarError
from octavo.text.grammar.lazy import AdmittedForms, get_digest
from tests.support.tiny_tokenizer import SPECIALS

END = SPECIALS.index("<eos>")
TURN = SPECIALS.index("<|turn|>")


@pytest.fixture
def holds(grammars, tokenizer):
    """A function that tells whether a form's grammar allows a whole text."""

    def check(form, text):
        token_ids = [*tokenizer.encode(text, add_special_tokens=False), END]
        return grammars.continues(grammars.admit(form), token_ids)

    return check


def form(schema, **options):
    return StructuredOutputs(json=schema, **options)


def refusal(grammars, outputs):
    with pytest.raises(InvalidRequest) as caught:
        grammars.admit(outputs)
    return str(caught.value)


# -- what is refused, and where --------------------------------------------------------------------


def of(schema):
    return {"type": "object", "properties": {"a": schema}}


ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]}

REFUSED = [
    (of({"not": {"type": "string"}}), "#/properties/a/not"),
    (of({"type": "array", "uniqueItems": True}), "#/properties/a/uniqueItems"),
    (of({"type": "string", "pattern": "("}), "#/properties/a/pattern"),
    (of({"type": "string", "pattern": "(?=a)b"}), "#/properties/a/pattern"),
    (of({"type": "string", "format": "no-such"}), "#/properties/a/format"),
    (
        {
            "type": "array",
            "items": {"type": "string", "minLength": 5, "maxLength": 3},
            "minItems": 1,
        },
        "#/items: Unsat",
    ),
    (of({"anyOf": [{"type": "string"}, {"if": {}, "then": {}}]}), "#/properties/a/anyOf/1/if"),
    (of({"$ref": "#/$defs/no"}) | {"$defs": {}}, "#/properties/a/$ref"),
    (of({"$ref": "#/$defs/y"}) | {"$defs": {"y": {"not": {}}}}, "#/$defs/y/not"),
    (of({"$ref": "#/$defs/x"}) | {"$defs": {"x": ENDLESS}}, "#/properties/a/$ref"),
    ({"$ref": "#"}, "#/$ref"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
    (of({"x-guidance": {"lenient": True}}), "#/properties/a/x-guidance"),
    (of({"const": "\ud800"}), "#/properties/a/const"),
    (of({"const": float("nan")}), "#/properties/a/const"),
    (of({"oneOf": [{"type": "object"}, {"type": "object", "required": ["b"]}]}), "#/properties/a"),
    (False, "#"),
]


@pytest.mark.parametrize(("schema", "pointer"), REFUSED, ids=lambda one: json.dumps(one)[:60])
def test_a_schema_that_cannot_be_kept_is_refused_with_the_place(grammars, schema, pointer):
    message = refusal(grammars, form(schema))
    assert message.startswith(f"structured_outputs: json: {pointer}"), message


def nested(depth, wrap, inner):
    for _ in range(depth):
        inner = wrap(inner)
    return inner


COSTLY = {
    "nested objects": form("[" * 10_000 + "]" * 10_000),
    "nested schemas": form(nested(200, of, {})),
    "a large enumeration": form({"enum": [f"value {i} of many" for i in range(300_000)]}),
    "many properties": form({"type": "object", "properties": {f"p{i}": {} for i in range(5_000)}}),
    "a product of alternatives": form(
        {"allOf": [{"anyOf": [of({"const": 10 * i + j}) for j in range(9)]} for i in range(9)]}
    ),
    "a nested group": StructuredOutputs(regex="(" * 10_000 + "a" + ")" * 10_000),
    "an optional tail": StructuredOutputs(regex="(a?){5000}a{5000}"),
    "a nested rule": StructuredOutputs(grammar="start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "nested GBNF": StructuredOutputs(grammar="root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "a long text": StructuredOutputs(regex="a" * (5 << 20)),
    "a lone surrogate": StructuredOutputs(regex="\udc80"),
}


@pytest.mark.parametrize("outputs", COSTLY.values(), ids=COSTLY)
def test_what_costs_too_much_is_refused_within_two_seconds(grammars, outputs):
    began = time.process_time()
    assert "structured_outputs: " in refusal(grammars, outputs)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "got none, expected exactly one of json"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice, expected exactly one"),
        ({"choice": []}, "structured_outputs.choice: got [], expected a list"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"json_object": False}, "structured_outputs.json_object: got False"),
        ({"regex": 5}, "structured_outputs.regex: got 5"),
        ({"json": {}, "whitespace_pattern": ""}, "structured_outputs.whitespace_pattern"),
        ({"jsn": {}}, "unknown field 'jsn'"),
    ],
)
def test_a_form_names_exactly_one_kind(fields, words):
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputs(**fields)
    assert words in str(caught.value)


# -- what is admitted, and what it allows ----------------------------------------------------------

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("outputs", "text", "allowed"),
    [
        (form(POINT), '{"x": 1, "y": -2}', True),
        (form(POINT), '{"x": 1, "z": 2}', False),
        (form(POINT), '{"y": 1}', False),
        (form(POINT), '{"x": 1', False),
        (form(POINT), '{"x":1}', False),
        (form(POINT), '{"x" : 1}', False),
        (form(POINT), '{"x": 1,"y": 2}', False),
        (form(POINT), '{ "x": 1}', False),
        (form(POINT), '{"x": 1 }', False),
        (form(POINT), '{\n  "x": 1\n}', False),
        (form(POINT, disable_any_whitespace=False), '{ "x" : 1,\n  "y":-2 }', True),
        (form(POINT, disable_any_whitespace=False), "{" + " " * 8 + '"x":1}', True),
        (form(POINT, disable_any_whitespace=False), "{" + " " * 9 + '"x":1}', False),
        (form(POINT, disable_any_whitespace=True), '{"x":1,"y":2}', True),
        (form(POINT, disable_any_whitespace=True), '{"x": 1}', False),
        (form(POINT, whitespace_pattern=" ?"), '{"x": 1}', True),
        (form(POINT, whitespace_pattern=" ?"), '{"x":\n1}', False),
        (form(json.dumps(POINT)), '{"x": 1}', True),
        (form({"type": "object"}), '{"any": [1, null, [], {}]}', True),
        (form(True), "[1]", True),
        (form({"oneOf": [{"const": 1}, {"const": "a"}, {"enum": [2, 3]}]}), "3", True),
        (form({"oneOf": [{"const": 1}, {"const": "a"}, {"enum": [2, 3]}]}), "4", False),
        (StructuredOutputs(json_object=True), "{}", True),
        (StructuredOutputs(json_object=True), '{"a": {"b": [1, 2]}}', True),
        (StructuredOutputs(json_object=True), '{"a":1}', False),
        (StructuredOutputs(json_object=True), "[]", False),
        (StructuredOutputs(regex="[a-c]{2}"), "ab", True),
        (StructuredOutputs(regex="[a-c]{2}"), "abc", False),
        (StructuredOutputs(regex="a{1,99999}"), "aaa", True),
        (StructuredOutputs(choice=['"q"\n', "\x7f\\d", "naïve"]), '"q"\n', True),
        (StructuredOutputs(choice=['"q"\n', "\x7f\\d", "naïve"]), "\x7f\\d", True),
        (StructuredOutputs(choice=['"q"\n', "\x7f\\d", "naïve"]), "naïve", True),
        (StructuredOutputs(choice=["a", "b"]), "ab", False),
        (StructuredOutputs(grammar='start: "a" b\nb: "b" | "c"'), "ac", True),
        (StructuredOutputs(grammar='root ::= "a" [0-9]+'), "a12", True),
        (StructuredOutputs(grammar='root ::= "a" [0-9]+'), "a", False),
    ],
    ids=str,
)
def test_a_grammar_allows_the_texts_of_its_form_alone(holds, outputs, text, allowed):
    assert holds(outputs, text) is allowed


def tagged(oneof, **fields):
    kinds = [{"const": name} for name in oneof]
    branches = [{**of(kind), "required": ["a"], "type": "object"} for kind in kinds]
    return {"oneOf": branches, **fields}


def test_branches_that_a_required_constant_tells_apart_are_admitted(holds):
    assert holds(form(tagged(["x", "y"])), '{"a": "y"}')
    assert not holds(form(tagged(["x", "y"])), '{"a": "z"}')


def test_a_recursive_schema_that_ends_is_admitted(holds):
    tree = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
    }
    assert holds(form(tree), '{"next": {"next": null}}')


# -- where the form begins -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('so I think.</think>{"x": 1}', True),
        ('so {I} think.</think>\n\n{"x": 1}', True),
        ('</think>{"x": 1}', True),
        ('{"x": 1}', False),
        ("so I think.</think>no", False),
        ("so I think.", False),
    ],
)
def test_a_form_may_begin_after_a_text(holds, text, allowed):
    assert holds(form(POINT, starts_after="</think>"), text) is allowed


def test_a_form_may_begin_after_a_special_token(grammars, tokenizer):
    spec = grammars.admit(form(POINT, starts_after="<|turn|>"))
    before, after = (
        tokenizer.encode(text, add_special_tokens=False) for text in ("hm", '{"x": 1}')
    )
    assert grammars.continues(spec, [*before, TURN, *after, END])
    assert not grammars.continues(spec, [*before, *after, END])


TOOLS = {
    "triggers": ["<tool"],
    "structures": [
        {"begin": "<tool=a>", "schema": POINT, "end": "</tool>"},
        {"begin": "<tool=b>", "regex": "[0-9]+", "end": "</tool>"},
    ],
}


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("just words", True),
        ('see <tool=a>{"x":1}</tool> and <tool=b>12</tool>', True),
        ('see <tool=a>{"x": 1, "y":2}</tool>', True),
        ('see <tool=a>{\n  "x": 1\n}</tool>', False),
        ('see <tool=a>{"x":  1}</tool>', False),
        ("see <tool=b>x", False),
        ("see <tool=c>", False),
        ('see <tool=a>{"x":1}', False),
        ("a <b> c", True),
    ],
)
def test_a_tag_once_begun_has_its_form(holds, text, allowed):
    assert holds(StructuredOutputs(structural_tag=TOOLS), text) is allowed


def test_special_tokens_are_no_text_of_a_form(grammars):
    spec = grammars.admit(StructuredOutputs(regex="(.|\n)*"))
    assert not grammars.continues(spec, [TURN])


# -- matchers --------------------------------------------------------------------------------------


def test_a_copied_matcher_goes_on_by_itself(grammars, tokenizer):
    spec = grammars.admit(StructuredOutputs(choice=["ab", "ac"]))
    first = grammars.compile(spec)
    a, b, c = tokenizer.encode("abc", add_special_tokens=False)
    first.accept_tokens([a])
    second = first.copy()
    first.accept_tokens([b])
    assert first.is_complete and not second.is_complete
    assert second.allows(c) and second.allows(b) and not second.allows(END)
    second.accept_tokens([c])
    assert second.is_complete and second.allows(END)


def test_the_mask_has_exactly_the_tokens_that_are_allowed(grammars, tokenizer):
    matcher = grammars.compile(grammars.admit(StructuredOutputs(regex="[a-c]*")))
    mask = matcher.mask()
    legal = [i for i in range(300) if mask[i // 8] >> (i % 8) & 1]
    assert sorted(legal) == sorted([END, *tokenizer.encode("abc", add_special_tokens=False)])
    assert legal == [i for i in range(300) if matcher.allows(i)]


def test_masks_made_together_are_those_made_alone(grammars, tokenizer):
    outputs = [StructuredOutputs(regex=f"[a-c]{{2}}{letter}*") for letter in "xyz"]
    made = [grammars.compile(grammars.admit(one)) for one in outputs]
    made[1].accept_tokens(tokenizer.encode("ab", add_special_tokens=False))
    assert grammars.masks(made) == [matcher.mask() for matcher in made]
    made[2].parser.consume_token(END)
    with pytest.raises(GrammarError):
        made[2].mask()
    assert grammars.masks(made) == [made[0].mask(), made[1].mask(), None]


def test_specs_of_equal_grammars_have_one_digest():
    one = GrammarSpec("json", "[]")
    assert one.digest == GrammarSpec("json", "[]", num_given_tokens=3).digest
    assert one.digest != GrammarSpec("json", "[]", starts_after="x").digest


# -- forms that are known --------------------------------------------------------------------------


def test_a_form_that_was_admitted_is_known_again(grammars, monkeypatch):
    first = grammars.admit(form({"type": "integer", "maximum": 1701}))
    monkeypatch.setattr(GrammarCompiler, "compile", None)
    assert grammars.admit(form({"type": "integer", "maximum": 1701})) is first
    for other in (
        form({"type": "integer", "maximum": 1701.5}),
        form({"type": "integer", "maximum": 1701}, disable_any_whitespace=True),
        form({"type": "integer", "maximum": 1701}, starts_after="</think>"),
    ):
        with pytest.raises(TypeError):
            grammars.admit(other)


def test_what_is_no_json_is_not_taken_for_what_is():
    assert get_digest(form({"const": float("nan")})) is None
    assert get_digest(form({"const": None})) != get_digest(form({"const": False}))
    assert get_digest(form({"const": 1})) != get_digest(form({"const": True}))
    assert get_digest(form({"const": "\ud800"})) != get_digest(form({"const": "?"}))


def test_known_forms_are_bounded():
    known = AdmittedForms(max_bytes=25)
    specs = [GrammarSpec("json", text * 10) for text in "abc"]
    for spec in specs:
        known.add(spec.digest, spec)
    assert [known.find(spec.digest) for spec in specs] == [None, *specs[1:]]
