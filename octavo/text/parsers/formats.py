"""Tool-call and reasoning formats, one row each, and their detection by chat template.

Names follow vLLM. Sources: models' chat templates and cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.api.structured_outputs import MessageFrame
from octavo.text.grammar.arguments import PairLayout
from octavo.text.parsers.bodies import JsonCalls, JsonOr, KeyValues, NamedJson
from octavo.text.parsers.calls import CallBody
from octavo.text.parsers.gemma import GemmaCalls
from octavo.text.parsers.pythonic import PythonCalls

NAME_HERE = "{name}"
"""Placeholder of the function name in a call's text."""
BAR = "\N{FULLWIDTH VERTICAL LINE}"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def _deepseek(words: str) -> str:
    """Returns one of DeepSeek's markers, which use special bar and space characters."""
    return f"<{BAR}{words.replace(' ', SPACE)}{BAR}>"


CALLS_BEGIN, CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
CALL_BEGIN, CALL_END = _deepseek("tool call begin"), _deepseek("tool call end")
SEPARATOR = _deepseek("tool sep")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: markers of sections and calls, and the call body."""

    name: str
    models: str
    """Models that use the format, for the docs."""
    body: CallBody
    written: tuple[str, str]
    """Texts before and after the arguments of a single call."""
    begin: Sequence[str] = ()
    """Section opening markers; () if calls start the output without a marker."""
    end: Sequence[str] = ()
    """Section closing markers, if any."""
    call_begin: str = ""
    call_end: str = ""
    found_by: Sequence[Sequence[str]] = ()
    """Sets of texts; a chat template that contains all texts of one set uses this format."""
    aliases: Sequence[str] = ()
    id_length: int = 0
    """Length of call ids in letters and digits if the template checks it; 0: any."""

    @property
    def triggers(self) -> Sequence[str]:
        """Texts that only occur at the beginning of calls."""
        return self.begin

    def arguments_form(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the constraint of a call's arguments, as fields of a structure."""
        return self.body.arguments_form(schema)

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must be visible even if they are special tokens."""
        texts = (*self.begin, *self.end, self.call_begin, self.call_end, *self.body.marks)
        return tuple(mark for mark in dict.fromkeys(texts) if mark)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Tags around a model's reasoning."""

    name: str
    models: str
    opening: str
    closing: str
    dropped: Sequence[str] = ()
    """Markers around the content that are not part of it."""
    found_by: Sequence[Sequence[str]] = ()
    aliases: Sequence[str] = ()
    tags: Sequence[str] = ()
    """Special tokens within the markers."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opening, self.closing, *self.dropped, *self.tags)


CHANNELS = MessageFrame(
    opening="<|channel|>",
    text="<|message|>",
    between="<|end|><|start|>assistant",
    unlike=("to=functions.",),
)


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """Messages with channel headers (gpt-oss): reasoning, content and calls."""

    name: str
    models: str
    found_by: Sequence[Sequence[str]]
    opening: str = "<|channel|>analysis<|message|>"
    closing: str = "<|channel|>final<|message|>"
    before_call: str = "<|end|><|start|>assistant"
    """Text between the analysis and a call."""
    before_content: str = "<|end|><|start|>assistant<|channel|>final<|message|>"
    """Text between the analysis and the content."""
    id_length: int = 0
    aliases: Sequence[str] = ()
    marks: tuple[str, ...] = (
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    )
    written: tuple[str, str] = (
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        "",
    )
    triggers: Sequence[str] = ()
    answer: tuple[str, str] = ("<|channel|>final<|message|>", "")
    """Texts before and after an answer without calls."""
    frame: MessageFrame = CHANNELS

    def arguments_form(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"schema": schema}


_PARAMETERS = KeyValues(
    name_open="<function=",
    name_end=">",
    layout=PairLayout("<parameter=", ">", "</parameter>", line="\n"),
    call_end="</function>",
)

HARMONY = ChannelFormat(
    "openai", "gpt-oss", found_by=[["<|channel|>", "<|message|>"]], aliases=("openai_gptoss",)
)

TOOL_FORMATS: Sequence[ToolFormat | ChannelFormat] = (
    HARMONY,
    ToolFormat(
        "qwen3_coder",
        "Qwen3-Coder, Qwen3.5",
        _PARAMETERS,
        written=("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"),
        begin=["<tool_call>"],
        end=["</tool_call>"],
        found_by=[["<tool_call>", "<function="]],
    ),
    ToolFormat(
        "glm45",
        "GLM-4.5 and later",
        KeyValues(
            name_open="",
            name_end="",
            layout=PairLayout("<arg_key>", "</arg_key>", "</arg_value>", "\n<arg_value>"),
            call_end="</tool_call>",
        ),
        written=("<tool_call>{name}\n", "</tool_call>"),
        begin=["<tool_call>"],
        found_by=[["<tool_call>", "<arg_key>"]],
        aliases=("glm47",),
    ),
    ToolFormat(
        "seed_oss",
        "Seed-OSS",
        _PARAMETERS,
        written=("<seed:tool_call>\n<function={name}>\n", "</function>\n</seed:tool_call>"),
        begin=["<seed:tool_call>"],
        end=["</seed:tool_call>"],
        found_by=[["<seed:tool_call>"]],
    ),
    ToolFormat(
        "hunyuan_a13b",
        "Hunyuan",
        JsonCalls(),
        written=('<tool_calls>[{"name": "{name}", "arguments": ', "}]</tool_calls>"),
        begin=["<tool_calls>"],
        end=["</tool_calls>"],
        found_by=[["<tool_calls>"]],
    ),
    ToolFormat(
        "gemma4",
        "Gemma 4",
        GemmaCalls(),
        written=("<|tool_call>call:{name}{", "}<tool_call|>"),
        begin=["<|tool_call>"],
        end=["<tool_call|>"],
        found_by=[["<|tool_call>"]],
    ),
    ToolFormat(
        "lfm2",
        "LFM2",
        PythonCalls(openings=()),
        written=("<|tool_call_start|>[{name}(", ")]<|tool_call_end|>"),
        begin=["<|tool_call_start|>"],
        end=["<|tool_call_end|>"],
        found_by=[["<|tool_call_start|>"], ["<|tool_list_start|>"]],
    ),
    ToolFormat(
        "hermes",
        "Qwen2.5, Qwen3, Hermes 2 and 3, SmolLM3, ERNIE 4.5",
        JsonCalls(),
        written=('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>"),
        begin=["<tool_call>"],
        end=["</tool_call>"],
        found_by=[["<tool_call>"]],
        aliases=("ernie45",),
    ),
    ToolFormat(
        "deepseek_v31",
        "DeepSeek-V3.1",
        NamedJson(separators=[SEPARATOR]),
        written=(
            f"{CALLS_BEGIN}{CALL_BEGIN}{NAME_HERE}{SEPARATOR}",
            f"{CALL_END}{CALLS_END}",
        ),
        begin=[CALLS_BEGIN],
        end=[CALLS_END],
        call_begin=CALL_BEGIN,
        call_end=CALL_END,
        found_by=[[CALLS_BEGIN, "</think>", "thinking"]],
    ),
    ToolFormat(
        "deepseek_v3",
        "DeepSeek-V3, DeepSeek-R1",
        NamedJson(before=f"function{SEPARATOR}", separators=["```json"]),
        written=(
            f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}{NAME_HERE}\n```json\n",
            f"\n```{CALL_END}{CALLS_END}",
        ),
        begin=[CALLS_BEGIN],
        end=[CALLS_END],
        call_begin=CALL_BEGIN,
        call_end=f"```{CALL_END}",
        found_by=[[CALLS_BEGIN]],
    ),
    ToolFormat(
        "kimi_k2",
        "Kimi K2",
        NamedJson(separators=["<|tool_call_argument_begin|>"]),
        written=(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        begin=["<|tool_calls_section_begin|>"],
        end=["<|tool_calls_section_end|>"],
        call_begin="<|tool_call_begin|>",
        call_end="<|tool_call_end|>",
        found_by=[["<|tool_calls_section_begin|>"]],
    ),
    ToolFormat(
        "minimax_m2",
        "MiniMax-M2",
        KeyValues(
            name_open='<invoke name="',
            name_end='">',
            layout=PairLayout('<parameter name="', '">', "</parameter>"),
            call_end="</invoke>",
        ),
        written=(
            '<minimax:tool_call>\n<invoke name="{name}">\n',
            "</invoke>\n</minimax:tool_call>",
        ),
        begin=["<minimax:tool_call>"],
        end=["</minimax:tool_call>"],
        found_by=[["<minimax:tool_call>"], ["minimax:tool_call"]],
    ),
    ToolFormat(
        "mistral_v11",
        "Mistral Small 3.2, Magistral, Devstral, Ministral 3",
        JsonOr(NamedJson(separators=["[ARGS]"], id_mark="[CALL_ID]")),
        written=("[TOOL_CALLS]{name}[ARGS]", ""),
        begin=["[TOOL_CALLS]"],
        found_by=[["[TOOL_CALLS]", "[ARGS]"]],
        id_length=9,
    ),
    ToolFormat(
        "mistral",
        "Mistral 7B v0.3 to Small 3.1",
        JsonOr(NamedJson(separators=["[ARGS]"], id_mark="[CALL_ID]")),
        written=('[TOOL_CALLS][{"name": "{name}", "arguments": ', "}]"),
        begin=["[TOOL_CALLS]"],
        found_by=[["[TOOL_CALLS]"]],
        id_length=9,
    ),
    ToolFormat(
        "granite",
        "Granite 3",
        JsonCalls(),
        written=('<|tool_call|>[{"name": "{name}", "arguments": ', "}]"),
        begin=["<|tool_call|>"],
        found_by=[["<|tool_call|>"]],
    ),
    ToolFormat(
        "cohere",
        "Command R7B, Command A",
        JsonCalls(),
        written=(
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "{name}", "parameters": ',
            "}\n]<|END_ACTION|>",
        ),
        begin=["<|START_ACTION|>"],
        end=["<|END_ACTION|>"],
        found_by=[["<|START_ACTION|>"]],
    ),
    ToolFormat(
        "phi4_mini_json",
        "Phi-4-mini",
        JsonCalls(),
        written=('functools[{"name": "{name}", "arguments": ', "}]"),
        begin=["functools"],
        found_by=[["functools"], ["<|tool|>", "<|/tool|>"]],
    ),
    ToolFormat(
        "olmo3",
        "OLMo 3",
        PythonCalls(in_list=False, openings=()),
        written=("<function_calls>\n{name}(", ")\n</function_calls>"),
        begin=["<function_calls>"],
        end=["</function_calls>"],
        found_by=[["<function_calls>"]],
    ),
    ToolFormat(
        "llama4_pythonic",
        "Llama 4",
        PythonCalls(),
        written=("<|python_start|>[{name}(", ")]<|python_end|>"),
        begin=["<|python_start|>"],
        end=["<|python_end|>"],
        found_by=[["<|python_start|>"]],
    ),
    ToolFormat(
        "llama3_json",
        "Llama 3.1 to 3.3",
        JsonOr(PythonCalls(in_list=False, suffix=".call"), openings=["{"]),
        written=('{"name": "{name}", "parameters": ', "}"),
        begin=["<|python_tag|>"],
        found_by=[["<|python_tag|>"], ["<|start_header_id|>", '"parameters"']],
    ),
    ToolFormat(
        "pythonic",
        "Llama 3.2, ToolACE",
        PythonCalls(),
        written=("[{name}(", ")]"),
        found_by=[["func_name1(params_name1=params_value1"], ["[func_name("]],
    ),
    ToolFormat(
        "json",
        "models without a format of their own",
        JsonCalls(),
        ('{"name": "{name}", "arguments": ', "}"),
    ),
)

REASONING_FORMATS: Sequence[ReasoningFormat | ChannelFormat] = (
    HARMONY,
    ReasoningFormat(
        "mistral", "Magistral", "[THINK]", "[/THINK]", found_by=[["[THINK]", "[/THINK]"]]
    ),
    ReasoningFormat(
        "seed_oss",
        "Seed-OSS",
        "<seed:think>",
        "</seed:think>",
        found_by=[["<seed:think>"], ["seed:think"]],
    ),
    ReasoningFormat(
        "cohere",
        "Command A Reasoning",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        dropped=["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"],
        found_by=[["<|START_THINKING|>"]],
    ),
    ReasoningFormat(
        "gemma4",
        "Gemma 4",
        "<|channel>thought\n",
        "<channel|>",
        found_by=[["<|channel>", "<channel|>"]],
        tags=["<|channel>"],
    ),
    ReasoningFormat(
        "hunyuan_a13b",
        "Hunyuan",
        "<think>",
        "</think>",
        dropped=["<answer>", "</answer>"],
        found_by=[["</think>", "<answer>"]],
    ),
    ReasoningFormat(
        "ernie45",
        "ERNIE 4.5",
        "<think>",
        "</think>",
        dropped=["<response>", "</response>"],
        found_by=[["</think>", "<response>"]],
    ),
    ReasoningFormat(
        "deepseek_r1",
        "DeepSeek-R1 and V3.1, Qwen3, QwQ, GLM-4.5, SmolLM3, MiniMax-M2, Kimi K2, OLMo 3",
        "<think>",
        "</think>",
        found_by=[["<think>", "</think>"], ["</think>"]],
        aliases=("qwen3", "glm45", "minimax_m2", "olmo3"),
    ),
)

DEFAULT_TOOL_FORMAT = "hermes"
"""Tool-call format described in the prompt for models whose template does not support tools."""


def find_tool_format(template: str | None) -> ToolFormat | ChannelFormat | None:
    """Returns the first tool format that a chat template matches; None if there is none."""
    return next((row for row in TOOL_FORMATS if _shows(template, row.found_by)), None)


def find_reasoning_format(template: str | None) -> ReasoningFormat | ChannelFormat | None:
    """Returns the first reasoning format that a chat template matches; None if there is none."""
    return next((row for row in REASONING_FORMATS if _shows(template, row.found_by)), None)


def named_tool_format(name: str) -> ToolFormat | ChannelFormat | None:
    return next((row for row in TOOL_FORMATS if name in (row.name, *row.aliases)), None)


def named_reasoning_format(name: str) -> ReasoningFormat | ChannelFormat | None:
    return next((row for row in REASONING_FORMATS if name in (row.name, *row.aliases)), None)


def _shows(template: str | None, found_by: Sequence[Sequence[str]]) -> bool:
    return template is not None and any(all(text in template for text in all_) for all_ in found_by)
