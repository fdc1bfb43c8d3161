"""Prepares a response (conversation, prompt, parser) and builds its final state.

A conversation with `previous_response_id` is rebuilt from the store; the prefix cache avoids
recomputing its prompt.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from pydantic import BaseModel

from octavo.api.errors import ContextTooLong, InvalidRequest, OctavoError
from octavo.api.sampling_params import SamplingParams
from octavo.frontend.input_processor import RequestContext
from octavo.server.conversation import Conversation
from octavo.server.http.error_formats import format_responses_error
from octavo.server.http.errors import make_fault
from octavo.server.http.request_limits import RequestLimits
from octavo.server.openai.logprobs import TokenNames, chat_logprobs
from octavo.server.openai.rendering import effort_variables
from octavo.server.openai.responses.body import (
    ResponseAllowedTools,
    ResponseBody,
    ResponseTool,
    ResponseToolName,
)
from octavo.server.openai.responses.events import Event, EventWriter
from octavo.server.openai.responses.history import get_previous_items, resolve_references
from octavo.server.openai.responses.items import make_messages, parse_input
from octavo.server.openai.responses.output import OutputItem, Piece, ToolListing, parse_output
from octavo.server.output_parser import OutputParser
from octavo.server.output_streams import OutputStreams
from octavo.server.response_builder import ChoiceDelta, ResponseBuilder, TokenUsage
from octavo.server.state.served_model import ServedModel
from octavo.server.state.store import Store
from octavo.server.tool_use import (
    NO_ARGUMENTS,
    Choice,
    OfferedFunction,
    ToolNames,
    ToolUse,
    make_tool_use,
)
from octavo.text.ports import Rendering

NAMES = ToolNames(name="name", parameters="parameters")
ROOM_FOR_ANSWER_TOKENS = 256
"""Tokens that truncation reserves for the output if max_output_tokens is not set."""


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A requested response, before its prompt is built."""

    id: str
    owner: str
    body: ResponseBody
    origin: RequestContext
    items: list[dict[str, Any]]
    """Items of its own input."""
    created_at: int


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A response whose prompt is built and whose fields are checked."""

    response_request: ResponseRequest
    model: ServedModel
    params: SamplingParams
    prompt: dict[str, Any]
    first: dict[str, Any]
    """The response object before its first token."""
    parser: OutputParser

    def start(self, turn: int = 0) -> ResponseBuilder:
        """Submits the request; raises ClientError if it is invalid. `turn` counts the requests of
        the same response.

        The builder does not parse the text: items are parsed from the stored pieces.
        """
        params, response_request = self.parser.apply_to(self.params), self.response_request
        streams = OutputStreams(
            self.model,
            [self.prompt],
            params,
            f"{response_request.id}-{turn}" if turn else response_request.id,
            origin=response_request.origin,
            deltas=True,
        )
        return ResponseBuilder(streams, params)

    def piece(self, delta: ChoiceDelta) -> Piece:
        """Returns the text and logprobs of a delta."""
        names = TokenNames(self.model.tokenizer, as_ids=False)
        chat = chat_logprobs(delta, self.params.num_shown_logprobs, names)
        return delta.text, [] if chat is None else msgspec.to_builtins(chat.content)

    def ended(
        self, builder: ResponseBuilder, pieces: Sequence[Piece], status: str | None = None
    ) -> dict[str, Any]:
        """Returns the final response object; `status` overrides the status that follows from the
        finish reason.
        """
        status = status or get_status(builder)
        output = parse_output(self.response_request.id, self.parser, pieces)
        if status in ("completed", "incomplete"):
            output.finish()
        usage = None if builder.latest is None else format_usage(builder.usage)
        return make_last(self.first, status, output.items, usage)


def get_status(builder: ResponseBuilder) -> str:
    """Returns the status that follows from a request's finish reason."""
    reason = None if builder.latest is None else builder.latest.outputs[0].finish_reason
    return {"stop": "completed", "length": "incomplete"}.get(reason or "", "cancelled")


def make_last(
    first: dict[str, Any],
    status: str,
    items: Sequence[OutputItem | ToolListing],
    usage: dict[str, Any] | None,
) -> dict[str, Any]:
    """Returns the final response object."""
    ending = "completed" if status == "completed" else "incomplete"
    too_long = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        **first,
        "status": status,
        "completed_at": int(time.time()) if status == "completed" else None,
        "incomplete_details": too_long,
        "output": [item.value("completed" if item is not items[-1] else ending) for item in items],
        "usage": usage,
    }


async def make_request(
    body: ResponseBody, owner: str, origin: RequestContext, store: Store | None
) -> ResponseRequest:
    """Creates a response request with a new id, and a seed so that it can be recomputed."""
    if body.seed is None:
        body.seed = secrets.randbits(63)
    name = f"resp_{secrets.token_hex(24)}"
    items = await resolve_references(
        parse_input(body.input, body.ignored), owner, store, body.ignored
    )
    return ResponseRequest(name, owner, body, origin, items, int(time.time()))


async def count_input_tokens(
    response_request: ResponseRequest, model: ServedModel, store: Store | None
) -> int:
    talk, _ = await _make_conversation(response_request, model, store, None)
    return len((await talk.prompt(model))["prompt_token_ids"])


async def _make_conversation(
    response_request: ResponseRequest,
    model: ServedModel,
    store: Store | None,
    mcp_functions: Sequence[OfferedFunction] | None,
) -> tuple[Conversation, int]:
    """Returns a response's conversation and its number of leading system messages."""
    instructions = response_request.body.instructions
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    before = await get_previous_items(
        response_request.body.previous_response_id, response_request.owner, store
    )
    messages = system + make_messages([*before, *response_request.items])
    if not messages:
        raise InvalidRequest("input: expected items or instructions, got none", param="input")
    return _conversation(response_request, model, messages, mcp_functions), len(system)


async def prepare_response(
    response_request: ResponseRequest,
    model: ServedModel,
    store: Store | None,
    mcp_functions: Sequence[OfferedFunction] | None = None,
) -> PreparedResponse:
    """Builds the prompt of a response; raises ClientError if it is invalid. `mcp_functions` are
    the tools of MCP servers; None: such tools are ignored.
    """
    body = response_request.body
    params = body.params(model.llm.get_default_chat_params())
    talk, num_system = await _make_conversation(response_request, model, store, mcp_functions)
    prompt = (
        await _truncate(talk, response_request, model, num_system)
        if body.truncation == "auto"
        else await talk.prompt(model)
    )
    first = _make_first(
        response_request, model, params, is_stored=body.is_stored and store is not None
    )
    parser = talk.parser(model, prompt)
    await model.llm.check_grammar(parser.apply_to(params))
    return PreparedResponse(response_request, model, params, prompt, first, parser)


def make_failed(first: dict[str, Any], error: OctavoError) -> dict[str, Any]:
    """Returns the final response object of a failed response."""
    error_fields = {"code": "server_error", "message": error.message}
    if isinstance(error, ContextTooLong):
        openai_error = format_responses_error(make_fault(error))["error"]
        error_fields = {"code": openai_error["code"], "message": openai_error["message"]}
    return {**first, "status": "failed", "error": error_fields}


async def stream_failure(
    response_request: ResponseRequest, model: ServedModel, error: OctavoError
) -> AsyncGenerator[list[Event], None]:
    """Yields the events of a stream that fails before its first token."""
    params = response_request.body.params(model.llm.get_default_chat_params())
    first = _make_first(response_request, model, params, is_stored=False)
    writer = EventWriter(first)
    yield [*writer.opening(), *writer.closing(make_failed(first, error))]


def _conversation(
    response_request: ResponseRequest,
    model: ServedModel,
    messages: list[dict[str, Any]],
    mcp_functions: Sequence[OfferedFunction] | None,
) -> Conversation:
    known = model.tokenizer.template_variables if model.tokenizer is not None else frozenset()
    effort = (
        None if response_request.body.reasoning is None else response_request.body.reasoning.effort
    )
    variables = effort_variables(effort, known, "reasoning.effort", response_request.body.ignored)
    return Conversation(
        messages,
        response_request.body.cache_salt,
        Rendering(variables=variables),
        tools=parse_tools(response_request.body, model.limits, mcp_functions),
    )


async def _truncate(
    talk: Conversation, response_request: ResponseRequest, model: ServedModel, num_system: int
) -> dict[str, Any]:
    """Returns the prompt. Omits the oldest messages as far as necessary to leave room for the
    output.
    """
    info = model.llm.info
    max_prompt_tokens = min(info.max_model_len, info.kv_capacity_tokens)
    room = response_request.body.max_output_tokens or min(
        ROOM_FOR_ANSWER_TOKENS, max_prompt_tokens // 4
    )
    system, messages = talk.messages[:num_system], talk.messages[num_system:]

    async def rendered(num_dropped: int) -> dict[str, Any]:
        shorter = replace(talk, messages=system + messages[num_dropped:])
        return await shorter.prompt(model)

    async def fits(num_dropped: int) -> bool:
        try:
            prompt = await rendered(num_dropped)
        except ContextTooLong:
            return False
        return len(prompt["prompt_token_ids"]) + room <= max_prompt_tokens

    low, high = 0, len(messages) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    return await rendered(low)


def _make_first(
    response_request: ResponseRequest,
    model: ServedModel,
    params: SamplingParams,
    *,
    is_stored: bool,
) -> dict[str, Any]:
    body = response_request.body
    return {
        "id": response_request.id,
        "object": "response",
        "created_at": response_request.created_at,
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": params.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": _to_json(body.tool_choice) or "auto",
        "tools": [_show_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _to_json(value: Any) -> Any:
    """Converts a part of a body to JSON types."""
    return value.model_dump() if isinstance(value, BaseModel) else value


def format_usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _show_tool(tool: ResponseTool) -> dict[str, Any]:
    """Returns a tool as the response repeats it, without secrets."""
    if tool.type == "function":
        return tool.model_dump(include={"type", "name", "description", "parameters", "strict"})
    shown = {"type", "server_label", "server_url", "allowed_tools", "require_approval"}
    return tool.model_dump(include=shown)


def parse_tools(
    body: ResponseBody,
    limits: RequestLimits,
    mcp_functions: Sequence[OfferedFunction] | None = None,
) -> ToolUse | None:
    """Returns the checked tools of a body; None if the model may not call any."""
    functions = [
        OfferedFunction(
            tool.name or "",
            NO_ARGUMENTS if tool.parameters is None else tool.parameters,
            tool.description,
            is_strict=tool.strict is True,
        )
        for tool in body.tools or ()
        if tool.type == "function"
    ]
    functions += mcp_functions or ()
    if mcp_functions is None:
        for index, tool in enumerate(body.tools or ()):
            if tool.type == "mcp":
                body.ignored.add(f"tools[{index}]", shown_as="tools[type=mcp]")
    choice, named = _choice(body)
    is_parallel = body.parallel_tool_calls is not False
    return make_tool_use(
        functions,
        choice,
        limits,
        named=named,
        is_parallel=is_parallel,
        names=NAMES,
        ignored=body.ignored,
    )


def _choice(body: ResponseBody) -> tuple[Choice | None, list[str] | None]:
    """Returns the tool choice and the names of allowed functions."""
    match body.tool_choice:
        case ResponseToolName(name=name):
            return "required", [name]
        case ResponseAllowedTools(mode=mode, tools=tools):
            return mode, [tool.name for tool in tools]
        case word:
            return word, None
