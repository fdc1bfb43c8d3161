"""Grammars of calls: what a format's grammar allows, its parser reads, and the schema holds."""

import json
import random

import jsonschema
import pytest

from octavo.api.errors import InvalidRequest
from octavo.api.structured_outputs import StructuredOutputs
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.text.grammar.admission import admit
from octavo.text.grammar.compiler import GrammarCompiler, TokenMatcher
from octavo.text.parsers.call_forms import (
    NO_REASONING,
    CallRules,
    ReasoningSpan,
    any_text,
    build_response_form,
)
from octavo.text.parsers.formats import (
    HARMONY,
    TOOL_FORMATS,
    named_reasoning_format,
    named_tool_format,
)
from octavo.text.parsers.reader import MessageForm, read_message
from octavo.text.tokenizer import load_tokenizer
from tests.support.call_texts import marked_vocabulary
from tests.support.tiny_tokenizer import save_tiny_tokenizer

FUNCTIONS = {
    "look_up": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 99},
            "unit": {"enum": ["C", "F"]},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"at": {"type": "boolean"}},
                "required": ["at"],
                "additionalProperties": False,
            }
        },
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
THINK = ReasoningSpan("<think>", "</think>")
END = 2
"""Id of the end token."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    source = tokenizer_source(folder, {}, {})
    assert source is not None
    return load_tokenizer(source)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_token_ids=[END])


def legal(matcher: TokenMatcher) -> list[int]:
    mask = matcher.mask()
    return [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]


def written(compiler, tokenizer, form, seed: int, *, begin: str = "") -> str:
    """Returns a text that a grammar allows, drawn at random; plain letters where they are legal."""
    draw = random.Random(seed)
    matcher = compiler.compile(admit(form, compiler))
    ids = tokenizer.encode(begin, add_special_tokens=False, allow_special_text=True)
    matcher.accept_tokens(ids)
    for _ in range(600):
        allowed = legal(matcher)
        assert allowed, tokenizer.decode(ids)
        if END in allowed:
            return tokenizer.decode(ids, skip_special_tokens=False)
        texts = {i: tokenizer.token_text(i) for i in allowed}
        plain = [i for i, text in texts.items() if text in set('abc12"}])<,/')]
        ids.append(draw.choice(plain or allowed))
        matcher.accept_tokens(ids[-1:])
    raise AssertionError(f"no end: {tokenizer.decode(ids)!r}")


def check(calls) -> None:
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), FUNCTIONS[call.name])


@pytest.mark.parametrize("name", [row.name for row in TOOL_FORMATS])
def test_a_call_that_must_be_made_is_read_and_meets_its_schema(compiler, tokenizer, name):
    tools = named_tool_format(name)
    assert tools is not None
    for seed in range(4):
        rules = CallRules(FUNCTIONS, must_call=True, may_call_several=bool(seed % 2))
        form = build_response_form(None, tools, rules, NO_REASONING)
        text = written(compiler, tokenizer, form, seed)
        message = read_message(MessageForm(tools, None, FUNCTIONS), text)
        assert message.content == "", text
        check(message.calls)


@pytest.mark.parametrize("name", [row.name for row in TOOL_FORMATS if row is not HARMONY])
def test_a_call_that_has_begun_is_completed(compiler, tokenizer, name):
    tools = named_tool_format(name)
    assert tools is not None
    form = build_response_form(None, tools, CallRules(FUNCTIONS), NO_REASONING)
    begin = tools.written[0].replace("{name}", "look_up")
    front = "" if tools.body.openings else "Well, "
    text = written(compiler, tokenizer, form, 3, begin=front + begin)
    message = read_message(MessageForm(tools, None, FUNCTIONS), text)
    check(message.calls)
    assert message.calls[0].name == "look_up"


@pytest.fixture(scope="module")
def channels(tmp_path_factory):
    """A tokenizer and a compiler of a vocabulary with the marks of messages."""
    return marked_vocabulary(tmp_path_factory.mktemp("channels"))


ANALYSIS = "<|channel|>analysis<|message|>I to=functions.x it.<|end|><|start|>assistant"
LOOK_UP = "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"
NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


def allows(channels, form, text: str) -> bool:
    """Returns whether a form's grammar takes a whole text."""
    tokenizer, compiler = channels
    matcher = compiler.compile(admit(form, compiler))
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special_text=True)
    for token_id in ids:
        if not matcher.allows(token_id):
            return False
        matcher.accept_tokens([token_id])
    return matcher.allows(END)


def test_a_call_among_messages_is_completed(channels):
    tokenizer, compiler = channels
    form = build_response_form(None, HARMONY, CallRules(FUNCTIONS), NO_REASONING)
    words = "<|channel|>commentary<|message|>I look." + NEXT
    for front in ("", ANALYSIS, words, ANALYSIS + words):
        made = written(compiler, tokenizer, form, 3, begin=front + LOOK_UP)
        message = read_message(MessageForm(HARMONY, HARMONY, FUNCTIONS), made)
        assert message.calls[0].name == "look_up"
        check(message.calls)


def test_messages_need_their_marks(compiler):
    form = build_response_form(None, HARMONY, CallRules(FUNCTIONS), NO_REASONING)
    with pytest.raises(InvalidRequest, match="no special tokens for"):
        admit(form, compiler)


FRAMED = [
    ("Plain words.", True),
    (FINAL + "Done.", True),
    (ANALYSIS + FINAL + "Done.", True),
    (ANALYSIS + NOW, True),
    (NOW + NEXT + NOW, True),
    (NOW + NEXT + FINAL + "Done.", True),
    ("<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}", False),
    ("<|channel|>commentary to=functions.now <|message|>{}", False),
    (LOOK_UP + '{"city": 3}', False),
    (LOOK_UP + '{"city": "Oslo"', False),
    ("<|start|>assistant", False),
]


@pytest.mark.parametrize(("text", "allowed"), FRAMED)
def test_messages_stand_around_calls(channels, text, allowed):
    form = build_response_form(None, HARMONY, CallRules(FUNCTIONS), NO_REASONING)
    assert allows(channels, form, text) is allowed


def test_one_call_at_most_among_messages(channels):
    rules = CallRules(FUNCTIONS, may_call_several=False)
    form = build_response_form(None, HARMONY, rules, NO_REASONING)
    assert allows(channels, form, ANALYSIS + NOW)
    assert not allows(channels, form, NOW + NEXT + NOW)


@pytest.mark.parametrize("most", [None, 5])
def test_an_answer_of_messages_has_its_form_or_calls(channels, most):
    own = StructuredOutputs(json={"const": {"a": 1}})
    before = ReasoningSpan(HARMONY.opening, HARMONY.before_call, most)
    form = build_response_form(own, HARMONY, CallRules(FUNCTIONS), before)
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for front in ("", analysis):
        assert allows(channels, form, front + FINAL + '{"a": 1}')
        assert allows(channels, form, front + NOW)
        assert not allows(channels, form, front + FINAL + '{"a": 2}')
        assert not allows(channels, form, front + FINAL + "words")


def test_messages_go_on_behind_a_reasoning_that_its_budget_ends(channels):
    before = ReasoningSpan(HARMONY.opening, HARMONY.before_call, 3)
    form = build_response_form(None, HARMONY, CallRules(FUNCTIONS), before)
    assert allows(channels, form, HARMONY.opening + "abc" + NEXT + NOW)
    assert allows(channels, form, HARMONY.opening + "abc" + NEXT + FINAL + "Done.")
    assert allows(channels, form, HARMONY.opening + "a" + NEXT + NOW)
    assert allows(channels, form, NOW) and allows(channels, form, FINAL + "Done.")
    assert not allows(channels, form, HARMONY.opening + "abcd" + NEXT + NOW)
    assert not allows(channels, form, HARMONY.opening + "a" + NEXT + HARMONY.opening + "more")


def test_one_call_alone_where_several_are_not_wanted(compiler, tokenizer):
    tools = named_tool_format("hermes")
    assert tools is not None
    rules = CallRules({"now": FUNCTIONS["now"]}, must_call=True, may_call_several=False)
    matcher = compiler.compile(
        admit(build_response_form(None, tools, rules, NO_REASONING), compiler)
    )
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    matcher.accept_tokens(tokenizer.encode(call, add_special_tokens=False))
    assert legal(matcher) == [END]


def test_an_answer_is_of_its_own_form_or_a_call(compiler, tokenizer):
    tools = named_tool_format("hermes")
    assert tools is not None
    own = StructuredOutputs(json={"const": {"a": 1}})
    form = build_response_form(own, tools, CallRules({"now": FUNCTIONS["now"]}), NO_REASONING)
    assert json.loads(written(compiler, tokenizer, form, 1, begin="{")) == {"a": 1}
    text = written(compiler, tokenizer, form, 1, begin="<tool")
    assert read_message(MessageForm(tools, None, FUNCTIONS), text).calls[0].name == "now"


@pytest.mark.parametrize("is_open", [False, True])
def test_a_form_begins_behind_the_reasoning(compiler, tokenizer, is_open):
    before = ReasoningSpan("" if is_open else "<think>", "</think>")
    tools = named_tool_format("hermes")
    assert tools is not None
    rules = CallRules(FUNCTIONS, must_call=True)
    form = build_response_form(None, tools, rules, before)
    begin = "abc {<tool_call>x</think>" if is_open else "<think>abc {<tool_call>x</think>"
    text = written(compiler, tokenizer, form, 5, begin=begin)
    reads = MessageForm(tools, named_reasoning_format("qwen3"), FUNCTIONS, is_open)
    message = read_message(reads, text)
    assert (message.reasoning, message.content) == ("abc {<tool_call>x", "")
    check(message.calls)
    if not is_open:
        check(read_message(reads, written(compiler, tokenizer, form, 6, begin="<tool")).calls)


@pytest.mark.parametrize("most", [0, 1, 9])
def test_reasoning_is_closed_after_its_budget(compiler, tokenizer, most):
    span = ReasoningSpan("<think>", "</think>", most)
    matcher = compiler.compile(admit(any_text(span, "thinking_token_budget"), compiler))
    matcher.accept_tokens(tokenizer.encode("<think>" + "a" * most, add_special_tokens=False))
    closing = tokenizer.encode("</think>", add_special_tokens=False)
    for token_id in closing:
        assert legal(matcher) == [token_id]
        matcher.accept_tokens([token_id])
    assert len(legal(matcher)) > 100


def test_reasoning_within_its_budget_ends_by_itself(compiler, tokenizer):
    form = any_text(ReasoningSpan("<think>", "</think>", 20), "thinking_token_budget")
    for text in ("<think>ab</think>c", "<think></think>c", "no thought"):
        matcher = compiler.compile(admit(form, compiler))
        matcher.accept_tokens(tokenizer.encode(text, add_special_tokens=False))
        assert END in legal(matcher), text


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "hermes"])
def test_schemas_of_arguments_are_checked_in_every_format(compiler, tokenizer, name):
    tools = named_tool_format(name)
    assert tools is not None
    endless = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}
    functions = {"f": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}} | endless}
    with pytest.raises(InvalidRequest, match=r"tools: f: #/.*recurses without end"):
        build_response_form(None, tools, CallRules(functions, must_call=True), NO_REASONING)
    told_apart = [
        {"type": "object", "required": ["k"], "properties": {"k": {"const": kind}}}
        for kind in ("a", "b")
    ]
    schema = {"type": "object", "properties": {"x": {"oneOf": told_apart}}, "required": ["x"]}
    functions = {"f": schema | {"additionalProperties": False}}
    form = build_response_form(None, tools, CallRules(functions, must_call=True), NO_REASONING)
    message = read_message(
        MessageForm(tools, None, functions), written(compiler, tokenizer, form, 1)
    )
    jsonschema.validate(json.loads(message.calls[0].arguments), functions["f"])


PATTERNS = {
    "^[a-c]{2,4}$": 3,
    "[0-9]+/x": 3,
    "^a|b$": 0,
    "^(a|b)+\\$$": 0,
    "^[^|]{3}\\|": 0,
}


@pytest.mark.parametrize(("pattern", "least"), PATTERNS.items())
@pytest.mark.parametrize("name", ["qwen3_coder", "hermes"])
def test_a_text_has_the_pattern_of_its_schema(compiler, tokenizer, name, pattern, least):
    text = {"type": "string", "pattern": pattern, "maxLength": 8}
    schema = {
        "type": "object",
        "properties": {"text": text | ({"minLength": least} if least else {})},
    }
    functions = {"say": schema | {"required": ["text"], "additionalProperties": False}}
    tools = named_tool_format(name)
    assert tools is not None
    form = build_response_form(None, tools, CallRules(functions, must_call=True), NO_REASONING)
    for seed in range(3):
        message = read_message(
            MessageForm(tools, None, functions), written(compiler, tokenizer, form, seed)
        )
        for call in message.calls:
            jsonschema.validate(json.loads(call.arguments), functions["say"])


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("must_call", [False, True])
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "json"])
def test_an_answer_with_tools_may_end_inside_its_reasoning(
    compiler, tokenizer, name, must_call, is_open
):
    before = ReasoningSpan("" if is_open else "<think>", "</think>")
    tools = named_tool_format(name)
    form = build_response_form(None, tools, CallRules(FUNCTIONS, must_call=must_call), before)
    for thought in ("<think>Hm, <tool_call> no", "<think>", "<think>a</think"):
        text = thought.removeprefix("<think>") if is_open else thought
        assert allows((tokenizer, compiler), form, text) is not must_call, text
    call = tools.written[0].replace("{name}", "now")
    matcher = compiler.compile(admit(form, compiler))
    opening = "" if is_open else "<think>"
    matcher.accept_tokens(
        tokenizer.encode(f"{opening}a</think>\n\n{call}", add_special_tokens=False)
    )
    assert END not in legal(matcher)
    if not must_call:
        assert allows((tokenizer, compiler), form, f"{opening}a</think>\n\nDone.")


@pytest.mark.parametrize("must_call", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_messages_may_end_inside_their_reasoning(channels, must_call, is_open):
    before = ReasoningSpan("" if is_open else HARMONY.opening, HARMONY.before_call)
    form = build_response_form(None, HARMONY, CallRules(FUNCTIONS, must_call=must_call), before)
    thought = "Hm." if is_open else HARMONY.opening + "Hm."
    assert allows(channels, form, thought) is not must_call
    assert allows(channels, form, thought + NEXT + NOW)
    assert allows(channels, form, thought + NEXT + FINAL + "Done.") is not must_call
    again = thought + NEXT + ANALYSIS.partition(NEXT)[0]
    assert allows(channels, form, again) is not must_call
