"""Request bodies of the Ollama API: rows of the table in `server/fields.py`, with Ollama's
names.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from octavo.api.errors import InvalidRequest
from octavo.server.fields import accepted, field, required, sampling
from octavo.server.http.body import Body
from octavo.server.http.body_part import BodyPart
from octavo.server.ollama.keep_alive import TAKES, KeepAlive
from octavo.server.openai.message_bodies import ContentPart, ToolBody

NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "mirostat": "mirostat_mode",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""SamplingParams fields by Ollama's names."""

UNBOUNDED = (-1, -2)
"""Values of num_predict without limit."""

Count = Field(None, ge=0, lt=2**31)
Flag = bool | None


class RunOptions(BodyPart):
    """Options of a request. The last group of fields concerns Ollama's runtime and has no
    effect.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = sampling("stop")
    num_predict: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_ctx: int | None = Field(None, ge=1, lt=2**31)

    num_keep: int | None = Field(None, ge=-1, lt=2**31)
    num_batch: int | None = Count
    num_gpu: int | None = Field(None, ge=-1, lt=2**31)
    main_gpu: int | None = Count
    num_thread: int | None = Count
    numa: Flag = None
    low_vram: Flag = None
    f16_kv: Flag = None
    use_mmap: Flag = None
    use_mlock: Flag = None


class OllamaBody(Body):
    """Base class of generation bodies."""

    stream_type = "application/x-ndjson"

    model: str = required("the name of a model, with or without :latest", "model to use")
    stream: bool | None = field(
        "true or false; null: true", "stream the response, one JSON object per line"
    )
    options: RunOptions | None = field(
        "an object of Ollama options", "sampling options", by_path=True
    )
    format: str | dict[str, Any] | None = field(
        '"json", or a JSON schema', "output format; an empty string is none"
    )
    think: bool | Literal["low", "medium", "high"] | None = field(
        'true or false, "low", "medium" or "high" if the template supports effort levels',
        "enable reasoning, and its effort; reasoning is returned separately",
    )
    logprobs: bool | None = field("true or false", "return logprobs of the output tokens")
    top_logprobs: int | None = field(
        "an integer from 0 to 20",
        "number of most likely alternatives returned for each token",
        rules={"needs": {"logprobs": [True]}, "neutral": 0},
        ge=0,
        le=20,
    )
    keep_alive: KeepAlive = field(
        TAKES, "time to keep the model loaded after the request; operator only"
    )
    truncate: bool | None = field(
        "false or null; a conversation that is too long is rejected", "truncate a long conversation"
    )
    shift: bool | None = field(
        "false or null; generation stops at the context limit",
        "shift the context during generation",
    )


class OllamaFunction(BodyPart):
    name: str
    arguments: str | dict[str, Any] | None = None
    index: int | None = None


class OllamaCall(BodyPart):
    """A tool call of an earlier response."""

    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(BodyPart):
    role: str
    content: str | list[ContentPart] | None = None
    """A text; OpenAI clients also send parts."""
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    images: list[str] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaBody):
    messages: list[OllamaMessage] | None = field(
        "a list of messages, each with a role and a content",
        "conversation; a last assistant message is continued",
        by_path=True,
    )
    tools: list[ToolBody] | None = field(
        "a list of functions, each with a name and a JSON schema of its arguments",
        "functions that the model can call",
        by_path=True,
    )


class OllamaGenerateBody(OllamaBody):
    unsupported: ClassVar[frozenset[str]] = frozenset({"width", "height", "steps"})

    prompt: str | None = field("a string", "prompt; with raw, text to continue")
    suffix: str | None = field(
        "a string; models with fill-in-the-middle tokens only",
        "text after the completion (fill-in-the-middle)",
        rules={"excludes": {"system": "not supported with fill-in-the-middle"}},
    )
    system: str | None = field("a string", "system message")
    raw: bool | None = field(
        "true or false",
        "complete the prompt without the chat template",
        rules={"excludes": {"system": "raw prompts use no template"}},
    )
    template: str | None = field(
        "null; this server uses the model's own chat template",
        "template to use instead of the model's",
    )
    context: list[int] | None = field(
        "null or an empty list; use POST /api/chat for conversations",
        "context tokens of an earlier response",
    )
    images: list[str] | None = field("a list of images in base64", "images for the prompt")


class NameBody(Body):
    """Base class of bodies that name a model."""

    model: str | None = field("the name of a model", "the model")
    name: str | None = field("the name of a model", "deprecated name of model")

    @property
    def known_as(self) -> str:
        """Name of the model in the request; raises InvalidRequest if it is missing."""
        name = self.model or self.name
        if not name:
            raise InvalidRequest("model: field required", param="model")
        return name


class PullBody(NameBody):
    stream_type = "application/x-ndjson"

    stream: bool | None = field(
        "true or false; null: true", "report progress, one JSON object per line"
    )
    insecure: bool | None = accepted("true or false")
    username: str | None = accepted("a string")
    password: str | None = accepted("a string")


class DeleteBody(NameBody):
    """Body of DELETE /api/delete."""


class CopyBody(Body):
    source: str = required("the name of a model", "model to copy")
    destination: str = required("a name", "new name")


class ShowBody(NameBody):
    verbose: bool | None = accepted("true or false")
