"""POST /v1/chat/completions: a conversation in, the next message out, whole or as a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import UNSET, UnsetType

from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.auth import origin_of
from octavo.server.body import body_bytes, body_of
from octavo.server.connection import unless_gone
from octavo.server.deltas import Delta
from octavo.server.generation import Generation
from octavo.server.openai.answer import Answer, usage_of, whole_of
from octavo.server.openai.bodies import ChatBody, SamplingBody
from octavo.server.openai.logprobs import chat_logprobs, plain_logprobs
from octavo.server.openai.messages import plain_messages
from octavo.server.openai.protocol import (
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    Usage,
)
from octavo.server.openai.rendering import rendering_of
from octavo.server.openai.sampling import sampling_params
from octavo.server.openai.tools import tools_of, uses_functions
from octavo.server.openai.truncation import truncation_of
from octavo.server.settings import ServerSettings
from octavo.server.sse import EventStream
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, service_of
from octavo.server.turn import Conversation, in_their_words
from octavo.text.parsers.parts import MessageText, Part, PartKind

PATH = "/v1/chat/completions"
ROLE = "assistant"

router = APIRouter()


@router.post(PATH)
async def chat(
    request: Request,
    service: Annotated[Service, Depends(service_of)],
    body: Annotated[ChatBody, Depends(body_of(ChatBody))],
) -> Response:
    with in_their_words(_words(body)):
        return await _answered(request, service, body)


async def _answered(request: Request, service: Service, body: ChatBody) -> Response:
    model = await service.model(body.model)
    params = _params(body, model.llm.get_default_chat_params())
    conversation = _conversation(body, model, service.settings)
    answer = ChatAnswer(
        body,
        params,
        model,
        echoed=_echoed(body, conversation.messages),
        tells_reasoning=body.include_reasoning is not False,
        uses_functions=uses_functions(body),
    )
    origin = origin_of(request, body.priority, body.user)
    prompt = await conversation.prompt(model)
    answer.reading = conversation.reading(model, prompt)
    service.readings.keep(answer.id, answer.reading, body_bytes(request))
    fitted = answer.reading.fitted(params)
    await model.llm.check_form(fitted)
    generation = Generation(
        model,
        [prompt],
        fitted,
        answer.id,
        origin=origin,
        deltas=bool(body.stream),
    )
    if body.stream:
        return EventStream(answer.events(generation))
    outputs = await unless_gone(request.receive, generation.results())
    return Response(
        msgspec.json.encode(answer.whole(outputs)),
        media_type="application/json",
    )


class ChatAnswer(Answer):
    """An answer in the form of chat completions."""

    prefix = "chatcmpl"

    def __init__(
        self,
        body: SamplingBody,
        params: SamplingParams,
        model: ServedModel,
        *,
        echoed: str = "",
        tells_reasoning: bool = True,
        uses_functions: bool = False,
    ) -> None:
        """With `uses_functions` a call has OpenAI's old form, `function_call`."""
        super().__init__(body, params, model)
        self._uses_functions = uses_functions
        self._echoed = echoed
        self._tells_reasoning = tells_reasoning

    def begin(self, made: ChatCompletion, output: RequestOutput) -> None:
        if self.returns_token_ids:
            made.prompt_token_ids = output.prompt_token_ids
        made.prompt_text = self.prompt_text(output)

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        made = self._completion("chat.completion", usage_of(outputs))
        for sample in output.outputs:
            found = self.reading.message(sample.text)
            message = self._message(found)
            whole = whole_of(sample, has_calls=bool(found.calls))
            made.choices.append(self._choice(sample.index, whole, message=message))
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
        told = [self._part(part) for part in delta.parts if self._tells(part)]
        if not told:
            told = [ChatMessage(content=UNSET if delta.finish_reason else "")]
        silent = Delta("", 0, [], None, None, None)
        choices = [self._choice(index, silent, delta=message) for message in told[:-1]]
        return [*opening, *choices, self._choice(index, delta, delta=told[-1])]

    def _tells(self, part: Part) -> bool:
        return self._tells_reasoning or part.kind is not PartKind.REASONING

    def _part(self, part: Part) -> ChatMessage:
        """Returns a stream's message with one new part."""
        match part.kind:
            case PartKind.REASONING:
                return ChatMessage(reasoning=part.text)
            case PartKind.CONTENT:
                return ChatMessage(content=part.text)
            case PartKind.CALL if self._uses_functions:
                return ChatMessage(function_call=CalledFunction(part.text))
            case PartKind.ARGUMENTS if self._uses_functions:
                return ChatMessage(function_call=CalledFunction(arguments=part.text))
            case PartKind.CALL:
                name = self.reading.call_id(part.call_id)
                call = ChatToolCall(CalledFunction(part.text), name, "function", part.call)
                return ChatMessage(tool_calls=[call])
            case PartKind.ARGUMENTS:
                called = CalledFunction(arguments=part.text)
                return ChatMessage(tool_calls=[ChatToolCall(called, index=part.call)])

    def _message(self, found: MessageText) -> ChatMessage:
        """Returns a whole message; its content is null where it is calls alone."""
        content = self._echoed + found.content
        message = ChatMessage(ROLE, content if content or not found.calls else None, None)
        if found.reasoning and self._tells_reasoning:
            message.reasoning = found.reasoning
        if found.calls and self._uses_functions:
            call = found.calls[0]
            message.function_call = CalledFunction(call.name, call.arguments)
        elif found.calls:
            message.tool_calls = [
                ChatToolCall(
                    CalledFunction(call.name, call.arguments),
                    self.reading.call_id(call.call_id),
                    "function",
                )
                for call in found.calls
            ]
        return message

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
            index, message, delta, self._logprobs(new), self._ending(new), new.stop_reason
        )
        if new.score is not None:
            choice.score = new.score
        if self.returns_token_ids:
            choice.token_ids = new.token_ids
        return choice

    def _ending(self, delta: Delta) -> str | None:
        """Returns OpenAI's word for how an answer ended."""
        if delta.finish_reason == "stop" and delta.has_calls:
            return "function_call" if self._uses_functions else "tool_calls"
        return delta.finish_reason

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        num_shown = self.params.num_shown_logprobs
        if num_shown is None or delta.logprobs is None:
            return None
        return chat_logprobs(delta.token_ids, delta.logprobs, num_shown, self.names)


def _conversation(body: ChatBody, model: ServedModel, settings: ServerSettings) -> Conversation:
    """Returns the body's messages and how they become a prompt."""
    rendering = rendering_of(body, model, settings, add_special_tokens=body.add_special_tokens)
    truncation = truncation_of(body, model.llm, _max_tokens(body))
    messages = plain_messages(
        body.messages, id_length=model.formats.tools.id_length, ignored=body.ignored
    )
    tools = tools_of(body, model.limits)
    budget = body.thinking_token_budget
    return Conversation(
        messages,
        body.cache_salt,
        rendering,
        truncation,
        tools,
        thinking_budget=None if budget == -1 else budget,
    )


def _echoed(body: ChatBody, messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text that the answer begins with."""
    last = messages[-1]
    return str(last["content"]) if body.echo and last["role"] == ROLE else ""


def _max_tokens(body: ChatBody) -> int | None:
    """Returns the most tokens of an answer, -1 for no limit; None is the model's default."""
    given = body.max_completion_tokens
    return body.max_tokens if given is None else given


def _params(body: ChatBody, defaults: SamplingParams) -> SamplingParams:
    return sampling_params(
        body,
        defaults,
        max_tokens=_max_tokens(body),
        logprobs=_num_logprobs(body),
    )


def _words(body: ChatBody) -> dict[str, str]:
    """Returns SamplingParams' name of each given field that the chat API names otherwise."""
    given = {"top_logprobs": body.top_logprobs, "max_completion_tokens": body.max_completion_tokens}
    ours = {"top_logprobs": "logprobs", "max_completion_tokens": "max_tokens"}
    return {name: ours[name] for name, value in given.items() if value is not None}


def _num_logprobs(body: ChatBody) -> int | None:
    """Returns the logprobs that are asked for; None too where they are listed, which says how many
    there are.
    """
    if body.logprob_token_ids is not None:
        return body.top_logprobs
    return (body.top_logprobs or 0) if body.logprobs else None
