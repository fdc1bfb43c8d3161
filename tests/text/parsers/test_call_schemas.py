"""One schema, every format: what a grammar admits, its parser reads and the schema holds; what the
schema holds, the grammar admits.
"""

import json
import random
from pathlib import Path

import jsonschema
import pytest

import tests
from octavo.text.grammar.enforceable import enforceable
from octavo.text.parsers.bodies import KeyValues
from octavo.text.parsers.call_forms import NO_REASONING, CallRules, build_response_form
from octavo.text.parsers.formats import HARMONY, NAME_HERE, TOOL_FORMATS, named_tool_format
from octavo.text.parsers.parts import MessageText
from octavo.text.parsers.reader import MessageForm, MessageReader, read_message
from tests.support.call_texts import (
    admits,
    call_text,
    ending_marks,
    marked_vocabulary,
    sampled_text,
)
from tests.support.tiers import examples, tier
from tests.support.tool_schemas import SchemaSource

CASES = [
    json.loads(line)
    for line in (Path(tests.__file__).parent / "data" / "tool_schemas.jsonl")
    .read_text()
    .splitlines()
]
FORMATS = [row.name for row in TOOL_FORMATS]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A tokenizer of bytes and the marks of messages, and a compiler over it."""
    return marked_vocabulary(tmp_path_factory.mktemp("tokenizer"))


def must_call(tools, schema):
    rules = CallRules({"f": schema}, must_call=True, may_call_several=False)
    return build_response_form(None, tools, rules, NO_REASONING)


def streamed(form: MessageForm, text: str, cut: int) -> MessageText:
    reader, message = MessageReader(form), MessageText()
    message.add(reader.read(text[:cut]))
    message.add(reader.read(text[cut:]))
    message.add(reader.read("", finished=True))
    return message


def message_form(tools, schema) -> MessageForm:
    return MessageForm(tools, HARMONY if tools is HARMONY else None, {"f": schema})


def read_arguments(tools, schema, text: str):
    """Returns the arguments of a text's one call, read whole and cut at some forty characters, or
    at every one in a soak.
    """
    form = message_form(tools, schema)
    message = read_message(form, text)
    assert len(message.calls) == 1 and message.content == "", text
    step = 1 if tier() == "soak" else max(1, len(text) // 40)
    for cut in range(1, len(text), step):
        assert streamed(form, text, cut) == message, (text, cut)
    return json.loads(message.calls[0].arguments)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["kind"])
def test_a_grammar_admits_what_its_schema_holds_and_nothing_else(vocabulary, name, case):
    tokenizer, compiler = vocabulary
    tools = named_tool_format(name)
    schema = enforceable(case["parameters"], is_strict=True).schema
    form = must_call(tools, schema)
    for arguments in case["valid"]:
        text = call_text(tools, "f", schema, arguments)
        assert admits(compiler, tokenizer, form, text), text
        assert read_arguments(tools, schema, text) == arguments, text
    for arguments in case["invalid"]:
        is_pairs = isinstance(getattr(tools, "body", None), KeyValues)
        if not isinstance(arguments, dict):
            text = f"{tools.written[0].replace('{name}', 'f')}{arguments}{tools.written[1]}"
            assert not admits(compiler, tokenizer, form, text)
        elif is_pairs or not jsonschema.Draft202012Validator(case["parameters"]).is_valid(
            arguments
        ):
            text = call_text(tools, "f", schema, arguments)
            is_read = admits(compiler, tokenizer, form, text)
            assert not is_read or read_arguments(tools, schema, text) != arguments, text


class DuplicateKey(Exception):
    """An object of the arguments has a name twice."""


def check_pairs(pairs):
    if len({key for key, _ in pairs}) < len(pairs):
        raise DuplicateKey
    return dict(pairs)


def check_sample(vocabulary, name: str, seed: int, *, is_forced: bool) -> bool:
    """Samples a call of a random schema, and returns whether one could be judged: a grammar keeps
    no free name from coming twice.
    """
    tokenizer, compiler = vocabulary
    rng = random.Random(f"{name} {seed} {is_forced}")
    schema = SchemaSource(seed).arguments()
    found = enforceable(schema, is_strict=False)
    tools = named_tool_format(name)
    assert tools is not None
    rules = CallRules({"f": found.schema}, must_call=is_forced, may_call_several=False)
    form = build_response_form(None, tools, rules, NO_REASONING)
    begin = "" if is_forced else tools.written[0].replace(NAME_HERE, "f")
    text = sampled_text(compiler, tokenizer, form, rng, begin, ending_marks(tools))
    if text is None:
        return False
    arguments = read_arguments(tools, found.schema, text)
    try:
        message = read_message(message_form(tools, found.schema), text)
        json.loads(message.calls[0].arguments, object_pairs_hook=check_pairs)
    except DuplicateKey:
        return False
    errors = list(jsonschema.Draft202012Validator(found.schema).iter_errors(arguments))
    assert not errors, (seed, name, text, arguments, errors[0].message, found)
    if not found.dropped:
        jsonschema.Draft202012Validator(schema).validate(arguments)
    return True


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("is_forced", [True, False], ids=["forced", "sampled"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_grammar_admits_is_read_and_the_schema_holds(vocabulary, name, is_forced):
    """In a soak 1,000 schemas for each format, forced and sampled."""
    is_forced = is_forced or name == HARMONY.name  # its sampled form is of whole messages
    judged = [
        check_sample(vocabulary, name, seed, is_forced=is_forced) for seed in range(examples(10))
    ]
    assert sum(judged) >= len(judged) // 4
