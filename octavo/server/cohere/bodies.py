"""Request bodies of the Cohere API: rows of the table in `server/fields.py`, with Cohere's names,
and the filters of `FilterBody`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from octavo.server.fields import accepted, field, required, sampling, stop_texts
from octavo.server.http.body_part import BodyPart
from octavo.server.openai.filter_body import FILTER_FIELDS, FilterBody
from octavo.server.openai.message_bodies import ToolBody, ToolCall
from octavo.server.plain_chat import TextBlock

NAMES = {
    "temperature": "temperature",
    "p": "top_p",
    "k": "top_k",
    "seed": "seed",
    "stop_sequences": "stop",
    "max_tokens": "max_tokens",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    **{name: name for name in FILTER_FIELDS},
}
"""SamplingParams fields by Cohere's names."""


class CohereDocument(BodyPart):
    """A document that a tool found."""

    data: str | dict[str, Any]
    id: str | None = None


class CohereBlock(TextBlock):
    """A block of a message."""

    types = ("text", "thinking", "document", "image_url")

    thinking: str | None = None
    document: CohereDocument | None = None


class CohereMessage(BodyPart):
    role: Literal["user", "assistant", "system", "tool"]
    content: str | list[CohereBlock] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tool_plan: str | None = None


class ThinkingSwitch(BodyPart):
    type: Literal["disabled", "enabled"]


class CohereFormat(BodyPart):
    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None


class CitationOptions(BodyPart):
    mode: Literal["OFF", "off", "disabled"]


class CohereChatBody(FilterBody):
    unsupported: ClassVar[frozenset[str]] = frozenset({"raw_prompting", "return_prompt"})

    model: str = required("the name of a model", "model to use")
    messages: list[CohereMessage] = required(
        "a list of messages, each with a role and a content", "conversation", by_path=True
    )
    stream: bool | None = field("true or false", "stream the response as typed events")
    max_tokens: int | None = sampling("max_tokens")
    stop_sequences: list[str] | None = stop_texts("a list of at most 5 strings", max_length=5)
    temperature: float | None = sampling("temperature")
    seed: int | None = sampling("seed")
    frequency_penalty: float | None = sampling("frequency_penalty")
    presence_penalty: float | None = sampling("presence_penalty")
    k: int | None = sampling("top_k")
    p: float | None = sampling("top_p")
    logprobs: bool | None = field("true or false", "return logprobs of the output tokens")
    priority: int | None = field(
        "a 32-bit integer",
        "scheduling priority, lower runs first; requires the priority policy",
        ge=-(2**31),
        lt=2**31,
    )
    thinking: ThinkingSwitch | None = field(
        'an object with the type "enabled" or "disabled"',
        "enable reasoning, if the model supports it",
        by_path=True,
    )
    response_format: CohereFormat | None = field(
        'an object with the type "text", or "json_object" and optionally a json_schema',
        "output format",
        by_path=True,
    )
    citation_options: CitationOptions | None = accepted(
        '{"mode": "OFF"}; citations are not supported'
    )
    safety_mode: Literal["OFF", "NONE"] | None = accepted(
        '"OFF"; safety instructions are not supported'
    )
    tool_choice: Literal["NONE", "REQUIRED"] | None = field(
        '"NONE", or "REQUIRED"', "whether to call a tool; null: the model decides"
    )
    strict_tools: bool | None = field(
        "true or false", "enforce the schema of arguments; always enforced for forced calls"
    )
    tools: list[ToolBody] | None = field(
        "a list of functions, each with a name and a JSON schema of its arguments",
        "functions that the model can call",
        by_path=True,
    )
    documents: list[str | dict[str, Any]] | None = field(
        "an empty list; documents are not supported", "documents to cite"
    )
