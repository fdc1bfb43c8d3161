"""POST /v1/chat/completions: a conversation in, the next message out, whole or as a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from octavo.server.openai.bodies import ChatBody, SamplingBody
from octavo.server.openai.logprobs import chat_logprobs, plain_logprobs
from octavo.server.openai.messages import plain_messages
from octavo.server.openai.protocol import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from octavo.server.openai.rendering import rendering_of
from octavo.server.openai.sampling import sampling_params
from octavo.server.openai.truncation import truncation_of
from octavo.server.settings import ServerSettings
from octavo.server.sse import EventStream
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, service_of
from octavo.server.turn import Conversation

PATH = "/v1/chat/completions"
ROLE = "assistant"

router = APIRouter()


@router.post(PATH)
async def chat(
    request: Request,
    service: Annotated[Service, Depends(service_of)],
    body: Annotated[ChatBody, Depends(body_of(ChatBody))],
) -> Response:
    model = service.model(body.model)
    _check(body)
    params = _params(body, model.llm.get_default_sampling_params())
    conversation = _conversation(body, model, service.settings)
    answer = ChatAnswer(body, params, model, _echoed(body, conversation.messages))
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

    def __init__(
        self, body: SamplingBody, params: SamplingParams, model: ServedModel, echoed: str = ""
    ) -> None:
        super().__init__(body, params, model)
        self._echoed = echoed

    def begin(self, made: ChatCompletion, output: RequestOutput) -> None:
        if self.returns_token_ids:
            made.prompt_token_ids = output.prompt_token_ids
        made.prompt_text = self.prompt_text(output)

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        made = self._completion("chat.completion", usage_of(outputs))
        for sample in output.outputs:
            message = ChatMessage(ROLE, self._echoed + sample.text, None)
            made.choices.append(self._choice(sample.index, whole_of(sample), message=message))
        self.begin(made, output)
        if self.params.prompt_logprobs is not None:
            made.prompt_logprobs = plain_logprobs(output.prompt_logprobs)
        made.timings = self.timings(outputs)
        return made

    def chunk(self, choices: list[ChatChoice], usage: Usage | UnsetType | None) -> ChatCompletion:
        made = self._completion("chat.completion.chunk", usage)
        made.choices = choices
        return made

    def additions(self, index: int, delta: Delta, output: RequestOutput) -> list[ChatChoice]:
        """Returns the delta's choices; a stream's first has the role alone."""
        opening = (
            [ChatChoice(index, UNSET, ChatMessage(ROLE, self._echoed), None, None, None)]
            if delta.is_first
            else []
        )
        content = delta.text if delta.text or not delta.finish_reason else UNSET
        return [*opening, self._choice(index, delta, delta=ChatMessage(content=content))]

    def _completion(self, kind: str, usage: Usage | UnsetType | None) -> ChatCompletion:
        return ChatCompletion(
            self.id, kind, self.created, self.model, [], self.fingerprint, usage=usage
        )

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


def _conversation(body: ChatBody, model: ServedModel, settings: ServerSettings) -> Conversation:
    """Returns the body's messages and how they become a prompt."""
    rendering = rendering_of(body, model, settings, add_special_tokens=body.add_special_tokens)
    truncation = truncation_of(body, model.llm, _max_tokens(body))
    return Conversation(plain_messages(body.messages), body.cache_salt, rendering, truncation)


def _echoed(body: ChatBody, messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text that the answer begins with."""
    last = messages[-1]
    return str(last["content"]) if body.echo and last["role"] == ROLE else ""


def _check(body: ChatBody) -> None:
    if body.tools:
        raise InvalidRequest("tools: this server does not support them", param="tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest(
            f"tool_choice: got {body.tool_choice!r}, and this server does not support tools",
            param="tool_choice",
        )


def _max_tokens(body: ChatBody) -> int | None:
    """Returns the most tokens of an answer; None until the context ends."""
    return body.max_completion_tokens if body.max_tokens is None else body.max_tokens


def _params(body: ChatBody, defaults: SamplingParams) -> SamplingParams:
    return sampling_params(
        body,
        defaults,
        max_tokens=_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
