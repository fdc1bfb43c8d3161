"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from msgspec import UNSET, UnsetType

from octavo.api.outputs import RequestOutput
from octavo.api.sampling_params import SamplingParams
from octavo.server.conversation import Conversation
from octavo.server.http.auth import get_request_context
from octavo.server.http.body import body_bytes, parse_body
from octavo.server.http.errors import use_api_names
from octavo.server.http.sse import EventStream
from octavo.server.openai.bodies import ChatBody, SamplingBody
from octavo.server.openai.formatter import OpenAIFormatter, format_usage
from octavo.server.openai.logprobs import chat_logprobs, plain_logprobs
from octavo.server.openai.messages import plain_messages
from octavo.server.openai.protocol import (
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatToolCall,
    Usage,
)
from octavo.server.openai.rendering import make_rendering
from octavo.server.openai.sampling import sampling_params
from octavo.server.openai.tools import parse_tools, uses_functions
from octavo.server.openai.truncation import parse_truncation
from octavo.server.response_builder import (
    ChoiceDelta,
    ResponseBuilder,
    send_response,
    start_chat,
)
from octavo.server.settings import ServerSettings
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, get_service
from octavo.text.parsers.parts import MessageText, Part, PartKind

PATH = "/v1/chat/completions"
ROLE = "assistant"

router = APIRouter()


@router.post(PATH)
async def chat(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[ChatBody, Depends(parse_body(ChatBody))],
) -> Response:
    with use_api_names(_get_names(body)):
        return await _respond(request, service, body)


async def _respond(request: Request, service: Service, body: ChatBody) -> Response:
    model = await service.model(body.model)
    params = _params(body, model.llm.get_default_chat_params())
    conversation = _conversation(body, model, service.settings)
    formatter = ChatFormatter(
        body,
        params,
        model,
        echoed=_echoed(body, conversation.messages),
        shows_reasoning=body.include_reasoning is not False,
        uses_functions=uses_functions(body),
    )
    origin = get_request_context(request, body.priority, body.user)
    response = await start_chat(
        model, conversation, params, formatter, origin=origin, stream=bool(body.stream)
    )
    service.parsers.keep(formatter.id, response.parser, body_bytes(request))
    return await send_response(request, response, formatter, EventStream if body.stream else None)


class ChatFormatter(OpenAIFormatter):
    prefix = "chatcmpl"

    def __init__(
        self,
        body: SamplingBody,
        params: SamplingParams,
        model: ServedModel,
        *,
        echoed: str = "",
        shows_reasoning: bool = True,
        uses_functions: bool = False,
    ) -> None:
        """With `uses_functions` tool calls have OpenAI's old format, `function_call`."""
        super().__init__(body, params, model, shows_reasoning=shows_reasoning)
        self._uses_functions = uses_functions
        self._echoed = echoed

    def add_prompt(self, completion: ChatCompletion, output: RequestOutput) -> None:
        if self.returns_token_ids:
            completion.prompt_token_ids = output.prompt_token_ids
        completion.prompt_text = self.prompt_text(output)

    def format_whole(
        self, response: ResponseBuilder, choices: Sequence[ChoiceDelta]
    ) -> ChatCompletion:
        completion = self._completion("chat.completion", format_usage(response.usage))
        completion.choices = [
            self._choice(choice, message=self._message(choice.message)) for choice in choices
        ]
        output = choices[0].output
        self.add_prompt(completion, output)
        if self.params.prompt_logprobs is not None:
            completion.prompt_logprobs = plain_logprobs(output.prompt_logprobs)
        completion.timings = self.timings(response)
        return completion

    def format_chunk(
        self, choices: list[ChatChoice], usage: Usage | UnsetType | None
    ) -> ChatCompletion:
        chunk = self._completion("chat.completion.chunk", usage)
        chunk.choices = choices
        return chunk

    def format_choices(self, delta: ChoiceDelta) -> list[ChatChoice]:
        """Returns the delta's choices, one for each part; the first one of a stream has only the
        role.
        """
        messages = [self._part(part) for part in delta.parts]
        if not messages:
            messages = [ChatMessage(content=UNSET if delta.finish_reason else "")]
        earlier = [self._empty_choice(delta.index, message) for message in messages[:-1]]
        if self.returns_token_ids:
            for choice in earlier:
                choice.token_ids = []
        if delta.is_first:
            earlier.insert(0, self._empty_choice(delta.index, ChatMessage(ROLE, self._echoed)))
        return [*earlier, self._choice(delta, delta=messages[-1])]

    def _empty_choice(self, index: int, message: ChatMessage) -> ChatChoice:
        return ChatChoice(index, UNSET, message, None, None, None)

    def _part(self, part: Part) -> ChatMessage:
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
                called = CalledFunction(part.text)
                call = ChatToolCall(called, part.call_id, "function", part.call)
                return ChatMessage(tool_calls=[call])
            case PartKind.ARGUMENTS:
                called = CalledFunction(arguments=part.text)
                return ChatMessage(tool_calls=[ChatToolCall(called, index=part.call)])

    def _message(self, text: MessageText) -> ChatMessage:
        """Returns a complete message; its content is null if it contains only tool calls."""
        content = self._echoed + text.content
        message = ChatMessage(ROLE, content if content or not text.calls else None, None)
        if text.reasoning:
            message.reasoning = text.reasoning
        if text.calls and self._uses_functions:
            call = text.calls[0]
            message.function_call = CalledFunction(call.name, call.arguments)
        elif text.calls:
            message.tool_calls = [
                ChatToolCall(CalledFunction(call.name, call.arguments), call.call_id, "function")
                for call in text.calls
            ]
        return message

    def _completion(self, kind: str, usage: Usage | UnsetType | None) -> ChatCompletion:
        return ChatCompletion(
            self.id, kind, self.created, self.model, [], self.fingerprint, usage=usage
        )

    def _choice(
        self,
        new: ChoiceDelta,
        *,
        message: ChatMessage | UnsetType = UNSET,
        delta: ChatMessage | UnsetType = UNSET,
    ) -> ChatChoice:
        choice = ChatChoice(
            new.index,
            message,
            delta,
            chat_logprobs(new, self.params.num_shown_logprobs, self.names),
            self._finish_reason(new),
            new.stop_reason,
        )
        if new.score is not None:
            choice.score = new.score
        if self.returns_token_ids:
            choice.token_ids = new.token_ids
        return choice

    def _finish_reason(self, delta: ChoiceDelta) -> str | None:
        is_old_form = self._uses_functions and delta.finish_reason == "tool_calls"
        return "function_call" if is_old_form else delta.finish_reason


def _conversation(body: ChatBody, model: ServedModel, settings: ServerSettings) -> Conversation:
    rendering = make_rendering(body, model, settings, add_special_tokens=body.add_special_tokens)
    truncation = parse_truncation(body, model.llm, _max_tokens(body))
    messages = plain_messages(
        body.messages, id_length=model.formats.tools.id_length, ignored=body.ignored
    )
    tools = parse_tools(body, model.limits)
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
    """Returns the echoed start of the response."""
    last = messages[-1]
    return str(last["content"]) if body.echo and last["role"] == ROLE else ""


def _max_tokens(body: ChatBody) -> int | None:
    """Returns max_tokens; -1 for no limit, None for the default."""
    max_tokens = body.max_completion_tokens
    return body.max_tokens if max_tokens is None else max_tokens


def _params(body: ChatBody, defaults: SamplingParams) -> SamplingParams:
    return sampling_params(
        body,
        defaults,
        max_tokens=_max_tokens(body),
        logprobs=_num_logprobs(body),
    )


def _get_names(body: ChatBody) -> dict[str, str]:
    """Maps fields of the chat API to SamplingParams fields of other names; only fields that are
    set.
    """
    values = {
        "top_logprobs": body.top_logprobs,
        "max_completion_tokens": body.max_completion_tokens,
    }
    ours = {"top_logprobs": "logprobs", "max_completion_tokens": "max_tokens"}
    return {name: ours[name] for name, value in values.items() if value is not None}


def _num_logprobs(body: ChatBody) -> int | None:
    """Returns SamplingParams.logprobs; None if logprob_token_ids determines the number."""
    if body.logprob_token_ids is not None:
        return body.top_logprobs
    return (body.top_logprobs or 0) if body.logprobs else None
