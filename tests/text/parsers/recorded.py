"""Answers in every format, as models write them, with the message that each is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from octavo.text.parsers.formats import named_reasoning_format, named_tool_format
from octavo.text.parsers.reader import MessageForm

FUNCTIONS: dict[str, dict[str, Any]] = {
    "look_up": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass(frozen=True)
class Recorded:
    """An answer and its message; `calls` are pairs of a name and arguments."""

    name: str
    text: str
    tools: str | None = None
    reasoning: str | None = None
    content: str = ""
    thought: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    is_open: bool = False
    """Whether the prompt opens the reasoning."""

    @property
    def form(self) -> MessageForm:
        return MessageForm(
            None if self.tools is None else named_tool_format(self.tools),
            None if self.reasoning is None else named_reasoning_format(self.reasoning),
            FUNCTIONS,
            self.is_open,
        )


def mark(words: str) -> str:
    """Returns a mark of DeepSeek's."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


OSLO = {"city": "Oslo \u2600 \U0001f327", "days": 3}
QUOTED = {"city": 'a "b" \\ </tool_call> [ARGS] } <|call|>'}


def text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text(arguments)}}}\n</tool_call>'


RECORDED = [
    Recorded("hermes", hermes("look_up", OSLO), "hermes", calls=(("look_up", OSLO),)),
    Recorded(
        "hermes, two with words",
        f"I look.\n{hermes('look_up', OSLO)}\n{hermes('now', {})}",
        "hermes",
        content="I look.",
        calls=(("look_up", OSLO), ("now", {})),
    ),
    Recorded(
        "hermes, tags in strings", hermes("look_up", QUOTED), "hermes", calls=(("look_up", QUOTED),)
    ),
    Recorded(
        "hermes, arguments first and as text",
        f'<tool_call>{{"arguments": {text(text(QUOTED))}, "name": "look_up"}}</tool_call>',
        "hermes",
        calls=(("look_up", QUOTED),),
    ),
    Recorded(
        "hermes, escaped characters",
        '<tool_call>{"name": "look_up", "arguments": "{\\"city\\": \\"\\ud83c\\udf27\\u2600\\"}"}',
        "hermes",
        calls=(("look_up", {"city": "\U0001f327\u2600"}),),
    ),
    Recorded(
        "hermes, thinking",
        f"<think>\nWhere? <tool_call>\n</think>\n\nHm.\n{hermes('now', {})}",
        "hermes",
        "qwen3",
        content="Hm.",
        thought="Where? <tool_call>",
        calls=(("now", {}),),
    ),
    Recorded(
        "qwen3_coder",
        "<tool_call>\n<function=look_up>\n<parameter=city>\nOslo \u2600 </tool_call>\n"
        '"x"\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=tags>\n["a", "b"]\n'
        "</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "qwen3_coder",
        calls=(
            (
                "look_up",
                {
                    "city": 'Oslo \u2600 </tool_call>\n"x"',
                    "days": 3,
                    "tags": ["a", "b"],
                    "note": None,
                },
            ),
            ("now", {}),
        ),
    ),
    Recorded(
        "seed_oss",
        "<seed:think>a\nb</seed:think><seed:tool_call>\n<function=look_up>\n"
        "<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>",
        "seed_oss",
        "seed_oss",
        thought="a\nb",
        calls=(("look_up", {"city": "Oslo"}),),
    ),
    Recorded(
        "glm45",
        "<think></think>\nYes.\n<tool_call>look_up\n<arg_key>city</arg_key>\n"
        "<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>",
        "glm45",
        "glm45",
        content="Yes.",
        calls=(("look_up", {"city": "Oslo", "days": 3}),),
    ),
    Recorded(
        "glm45, of GLM-4.7",
        "<think>Where?</think><tool_call>look_up<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "glm47",
        "glm45",
        thought="Where?",
        calls=(("look_up", {"city": "Oslo", "days": 3}),),
    ),
    Recorded(
        "gemma4",
        '<|channel>thought\nI look.\n<channel|>Hm.<|tool_call>call:look_up{city:<|"|>Oslo "\u2600"'
        ', {x}<|"|>,days:3,tags:[<|"|>a<|"|>,<|"|><|"|>],note:null}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "gemma4",
        "gemma4",
        content="Hm.",
        thought="I look.",
        calls=(
            (
                "look_up",
                {"city": 'Oslo "\u2600", {x}', "days": 3, "tags": ["a", ""], "note": None},
            ),
            ("now", {}),
        ),
    ),
    Recorded(
        "gemma4, nested values and JSON's strings",
        '<|tool_call>call:look_up{city:"a \\"b\\"", <|"|>a key<|"|>: {b:[true,{c:-1.5}],d:{}},'
        "tags:[],word:two words}<tool_call|>",
        "gemma4",
        calls=(
            (
                "look_up",
                {
                    "city": 'a "b"',
                    "a key": {"b": [True, {"c": -1.5}], "d": {}},
                    "tags": [],
                    "word": "two words",
                },
            ),
        ),
    ),
    Recorded(
        "gemma4, an answer without thoughts",
        "<|channel>thought\n<channel|>Rain.",
        None,
        "gemma4",
        content="Rain.",
    ),
    Recorded(
        "lfm2",
        "<|tool_call_start|>[look_up(city='Oslo', days=3), now()]<|tool_call_end|>Wait.",
        "lfm2",
        content="Wait.",
        calls=(("look_up", {"city": "Oslo", "days": 3}), ("now", {})),
    ),
    Recorded(
        "hunyuan_a13b",
        "<think>\nWhere?\n</think>\n<answer>\nI look.\n"
        f'<tool_calls>[{{"name": "look_up", "arguments": {text(OSLO)}}}, '
        '{"name": "now", "arguments": {}}]</tool_calls>\n</answer>',
        "hunyuan_a13b",
        "hunyuan_a13b",
        content="I look.",
        thought="Where?",
        calls=(("look_up", OSLO), ("now", {})),
    ),
    Recorded(
        "ernie45",
        "Where?\n</think>\n\n<response>\nIn Oslo.\n</response>\n",
        "ernie45",
        "ernie45",
        content="In Oslo.",
        thought="Where?",
        is_open=True,
    ),
    Recorded(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="look_up">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        "minimax_m2",
        calls=(("look_up", {"city": "Oslo", "days": 3}),),
    ),
    Recorded(
        "deepseek_v3",
        f"On it.{mark('tool calls begin')}{mark('tool call begin')}function{mark('tool sep')}"
        f"look_up\n```json\n{text(OSLO)}\n```{mark('tool call end')}\n{mark('tool call begin')}"
        f"function{mark('tool sep')}now\n```json\n{{}}\n```{mark('tool call end')}"
        f"{mark('tool calls end')}",
        "deepseek_v3",
        content="On it.",
        calls=(("look_up", OSLO), ("now", {})),
    ),
    Recorded(
        "deepseek_v31, opened by the prompt",
        f"I think.</think>On it.{mark('tool calls begin')}{mark('tool call begin')}look_up"
        f"{mark('tool sep')}{text(OSLO)}{mark('tool call end')}{mark('tool call begin')}now"
        f"{mark('tool sep')}{{}}{mark('tool call end')}{mark('tool calls end')}",
        "deepseek_v31",
        "deepseek_r1",
        content="On it.",
        thought="I think.",
        calls=(("look_up", OSLO), ("now", {})),
        is_open=True,
    ),
    Recorded(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0"
        f"<|tool_call_argument_begin|>{text(OSLO)}<|tool_call_end|><|tool_calls_section_end|>",
        "kimi_k2",
        calls=(("look_up", OSLO),),
    ),
    Recorded(
        "mistral, a list",
        f'[TOOL_CALLS][{{"name": "look_up", "arguments": {text(OSLO)}}}, {{"name": "now", '
        '"arguments": {}, "id": "abcdefghi"}]',
        "mistral",
        calls=(("look_up", OSLO), ("now", {})),
    ),
    Recorded(
        "mistral, names",
        f"[THINK]So.[/THINK]Sure[TOOL_CALLS]look_up[CALL_ID]abcdefghi[ARGS]{text(QUOTED)}"
        "[TOOL_CALLS]now[ARGS]{}",
        "mistral_v11",
        "mistral",
        content="Sure",
        thought="So.",
        calls=(("look_up", QUOTED), ("now", {})),
    ),
    Recorded(
        "granite",
        f'<|tool_call|>[{{"name": "look_up", "arguments": {text(OSLO)}}}]',
        "granite",
        calls=(("look_up", OSLO),),
    ),
    Recorded(
        "phi4",
        f'functools[{{"name": "look_up", "arguments": {text(OSLO)}}}]',
        "phi4_mini_json",
        calls=(("look_up", OSLO),),
    ),
    Recorded(
        "cohere",
        "<|START_THINKING|>I will.<|END_THINKING|><|START_ACTION|>[\n    "
        f'{{"tool_call_id": "0", "tool_name": "look_up", "parameters": {text(OSLO)}}}\n]'
        "<|END_ACTION|>",
        "cohere",
        "cohere",
        thought="I will.",
        calls=(("look_up", OSLO),),
    ),
    Recorded(
        "cohere, an answer",
        "<|START_THINKING|>I.<|END_THINKING|><|START_RESPONSE|>Rain.<|END_RESPONSE|>",
        None,
        "cohere",
        content="Rain.",
        thought="I.",
    ),
    Recorded(
        "llama3_json",
        f'{{"name": "look_up", "parameters": {text(OSLO)}}}; {{"name": "now", "parameters": {{}}}}',
        "llama3_json",
        calls=(("look_up", OSLO), ("now", {})),
    ),
    Recorded(
        "llama3_json, python tag",
        f'<|python_tag|>{{"name": "look_up", "parameters": {text(OSLO)}}}',
        "llama3_json",
        calls=(("look_up", OSLO),),
    ),
    Recorded(
        "llama3_json, a built-in function",
        '<|python_tag|>look_up.call(city="Oslo")',
        "llama3_json",
        calls=(("look_up", {"city": "Oslo"}),),
    ),
    Recorded(
        "pythonic",
        "[look_up(city='a \"b\" \\'\\u2600\\', c)', days=-3, tags=['x', {'y': None}]), now()]",
        "pythonic",
        calls=(
            ("look_up", {"city": "a \"b\" '\u2600', c)", "days": -3, "tags": ["x", {"y": None}]}),
            ("now", {}),
        ),
    ),
    Recorded(
        "llama4_pythonic",
        '<|python_start|>[look_up(city="""Oslo\n""", note=None)]<|python_end|>',
        "llama4_pythonic",
        calls=(("look_up", {"city": "Oslo\n", "note": None}),),
    ),
    Recorded(
        "olmo3",
        '<function_calls>\nlook_up(city="Oslo")\nnow()\n</function_calls>',
        "olmo3",
        calls=(("look_up", {"city": "Oslo"}), ("now", {})),
    ),
    Recorded(
        "openai",
        "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>Look.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"
        f"{text(OSLO)}<|call|>",
        "openai",
        "openai_gptoss",
        content="I look.",
        thought="The user asks.\nLook.",
        calls=(("look_up", OSLO),),
    ),
    Recorded(
        "openai, an answer",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Rain.",
        None,
        "openai",
        content="Rain.",
        thought="Hm",
    ),
    Recorded(
        "json",
        f'{{"name": "look_up", "arguments": {text(OSLO)}}}',
        "json",
        calls=(("look_up", OSLO),),
    ),
    Recorded("a text", "No call: {}.", "json", content="No call: {}."),
]
"""Answers in every format."""

UNFINISHED = [
    Recorded("no call", "a <tool_call> nothing </tool_call> b", "hermes"),
    Recorded("a tag that begins", "a <tool_ca", "hermes"),
    Recorded("an opening at the end", "a <tool_call>", "hermes"),
    Recorded("a name that is cut", '<tool_call>{"name": "look', "hermes"),
    Recorded("a name that is no text", '<tool_call>{"name": 3}</tool_call>', "hermes"),
    Recorded("an unknown key", '{"name_": "now"}', "llama3_json"),
    Recorded("an unknown function", '{"name": "nope", "parameters": {}}', "llama3_json"),
    Recorded("an object of other keys", '{"name": "Bo", "age": 3}', "json"),
    Recorded("a list of texts", '["a", "b"]', "pythonic"),
    Recorded("an import", "import functools\nx = 1", "phi4_mini_json"),
    Recorded("no name", f"{mark('tool calls begin')}x", "deepseek_v3"),
    Recorded("a broken escape", '<tool_call>{"name": "\\uzz"}', "hermes"),
    Recorded("only space", " \n ", "hermes", "qwen3"),
    Recorded("space around", " \n a \n", "hermes", "qwen3"),
]
"""Answers that look like calls and are none: all of the text is content."""
