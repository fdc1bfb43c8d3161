"""POST /v1/chat/completions: a conversation in, the next message out, whole or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import UNSET, UnsetType

from octavo.errors import InvalidRequest
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.auth import origin_of
from octavo.server.body import body_of
from octavo.server.connection import unless_gone
from octavo.server.deltas import Delta
from octavo.server.generation import Generation
from octavo.server.openai.answer import Answer, usage_of, whole_of
from octavo.server.openai.logprobs import chat_logprobs, plain_logprobs
from octavo.server.openai.protocol import (
    ChatBody,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Message,
    TextPart,
    Usage,
)
from octavo.server.openai.sampling import check_stream_options, sampling_params
from octavo.server.sse import EventStream
from octavo.server.state.service import Service, service_of
from octavo.server.turn import Conversation

ROLE = "assistant"

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(
    request: Request,
    service: Annotated[Service, Depends(service_of)],
    body: Annotated[ChatBody, Depends(body_of(ChatBody))],
) -> Response:
    model = service.model(body.model)
    _check(body)
    params = _params(body, model.llm.get_default_sampling_params())
    conversation = Conversation(
        plain_messages(body.messages),
        body.cache_salt,
        body.add_generation_prompt,
        body.chat_template_kwargs,
    )
    answer = ChatAnswer(body, params, model.name, model.tokenizer)
    origin = origin_of(request, body.priority, body.user)
    prompt = await conversation.prompt(model)
    generation = Generation(
        model, [prompt], params, answer.id, origin=origin, deltas=bool(body.stream)
    )
    if body.stream:
        return EventStream(answer.events(generation), body.headers)
    outputs = await unless_gone(request.receive, generation.results())
    return Response(
        msgspec.json.encode(answer.whole(outputs)),
        headers=body.headers,
        media_type="application/json",
    )


class ChatAnswer(Answer):
    """An answer in the form of chat completions."""

    prefix = "chatcmpl"

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        made = ChatCompletion(
            self.id, "chat.completion", self.created, self.model, [], usage_of(outputs)
        )
        for sample in output.outputs:
            made.choices.append(
                self._choice(
                    sample.index, whole_of(sample), message=ChatMessage(ROLE, sample.text, None)
                )
            )
        if self.returns_token_ids:
            made.prompt_token_ids = output.prompt_token_ids
        if self.params.prompt_logprobs is not None:
            made.prompt_logprobs = plain_logprobs(output.prompt_logprobs)
        made.timings = self.timings(outputs)
        return made

    def chunk(self, choices: list[ChatChoice], usage: Usage | UnsetType | None) -> ChatCompletion:
        return ChatCompletion(
            self.id, "chat.completion.chunk", self.created, self.model, choices, usage
        )

    def additions(self, index: int, delta: Delta, output: RequestOutput) -> list[ChatChoice]:
        """Returns the delta's choices; a stream's first has the role alone."""
        opening = (
            [ChatChoice(index, UNSET, ChatMessage(ROLE, ""), None, None, None)]
            if delta.is_first
            else []
        )
        content = delta.text if delta.text or not delta.finish_reason else UNSET
        return [*opening, self._choice(index, delta, delta=ChatMessage(content=content))]

    def _choice(
        self,
        index: int,
        new: Delta,
        *,
        message: ChatMessage | UnsetType = UNSET,
        delta: ChatMessage | UnsetType = UNSET,
    ) -> ChatChoice:
        choice = ChatChoice(
            index, message, delta, self._logprobs(new), new.finish_reason, new.stop_reason
        )
        if new.score is not None:
            choice.score = new.score
        if self.returns_token_ids:
            choice.token_ids = new.token_ids
        return choice

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if self.params.logprobs is None or delta.logprobs is None:
            return None
        return chat_logprobs(delta.token_ids, delta.logprobs, self.params.logprobs, self.names)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Converts messages for a chat template; raises InvalidRequest for parts it cannot honour."""
    if not messages:
        raise InvalidRequest(
            "messages: got an empty list, needed is at least one message", param="messages"
        )
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: Message, where: str) -> dict[str, Any]:
    for name, value in (message.model_extra or {}).items():
        if value not in (None, []):
            raise InvalidRequest(
                f"{where}.{name}: this server does not support it", param=f"{where}.{name}"
            )
    plain: dict[str, Any] = {
        "role": message.role,
        "content": _text(message.content, f"{where}.content"),
    }
    return plain if message.name is None else plain | {"name": message.name}


def _text(content: str | list[TextPart] | None, where: str) -> str:
    """Joins the parts of a content, each on lines of its own."""
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"{where}: needed, and not given", param=where)
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            allowed = "allowed are parts of type 'text' with a text"
            raise InvalidRequest(
                f"{where}[{index}]: got a part of type {part.type!r}, {allowed}",
                param=f"{where}[{index}]",
            )
    return "\n".join(part.text or "" for part in content)


def _check(body: ChatBody) -> None:
    check_stream_options(body)
    if body.tools:
        raise InvalidRequest("tools: this server does not support them", param="tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest(
            f"tool_choice: got {body.tool_choice!r}, and this server does not support tools",
            param="tool_choice",
        )
    if body.response_format is not None and body.response_format.get("type") != "text":
        got = body.response_format.get("type")
        raise InvalidRequest(
            f"response_format: got the type {got!r}, allowed is 'text'", param="response_format"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest(
            "top_logprobs: allowed only where logprobs is true", param="top_logprobs"
        )
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise InvalidRequest(
            f"top_logprobs: got {body.top_logprobs}, allowed is a whole number from 0 up",
            param="top_logprobs",
        )
    if (
        None not in (body.max_tokens, body.max_completion_tokens)
        and body.max_tokens != body.max_completion_tokens
    ):
        raise InvalidRequest(
            "max_tokens: differs from max_completion_tokens, which means the same",
            param="max_tokens",
        )


def _params(body: ChatBody, defaults: SamplingParams) -> SamplingParams:
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    return sampling_params(
        body,
        defaults,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
