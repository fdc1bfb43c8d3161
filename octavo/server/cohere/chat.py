"""POST /v2/chat. Source: Cohere's API reference, version 2."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from octavo.api.errors import InvalidRequest
from octavo.api.structured_outputs import StructuredOutputs
from octavo.server.cohere.bodies import (
    NAMES,
    CohereBlock,
    CohereChatBody,
    CohereFormat,
    CohereMessage,
)
from octavo.server.cohere.formatter import CohereFormatter, stream_kind
from octavo.server.conversation import Conversation
from octavo.server.http.auth import get_request_context
from octavo.server.http.body import body_bytes, parse_body
from octavo.server.http.errors import use_api_names
from octavo.server.openai.messages import MAY_BE_EMPTY, plain_call
from octavo.server.openai.tools import convert_function
from octavo.server.plain_chat import block_text, make_params, make_rendering, refuse_values
from octavo.server.response_builder import send_response, start_chat
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, get_service
from octavo.server.tool_use import Choice, check_role, make_tool_use

CHOICES: dict[str | None, Choice | None] = {None: None, "NONE": "none", "REQUIRED": "required"}

router = APIRouter()


@router.post("/v2/chat")
@router.post("/cohere/v2/chat")
async def chat(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[CohereChatBody, Depends(parse_body(CohereChatBody))],
) -> Response:
    model = await service.model(body.model)
    refuse_values(body, ["documents"])
    logprobs = 0 if body.logprobs else None
    others: dict[str, Any] = {
        "logprobs": logprobs,
        "structured_outputs": _form(body.response_format),
    }
    params = make_params(body, NAMES, model.llm.get_default_chat_params(), **others)
    formatter = CohereFormatter(model.tokenizer)
    origin = get_request_context(request, body.priority, None)
    with use_api_names(NAMES):
        conversation = _conversation(body, model)
        response = await start_chat(
            model, conversation, params, formatter, origin=origin, stream=bool(body.stream)
        )
    service.parsers.keep(formatter.id, response.parser, body_bytes(request))
    stream_type = stream_kind(request.headers.get("accept")) if body.stream else None
    return await send_response(request, response, formatter, stream_type)


def _conversation(body: CohereChatBody, model: ServedModel) -> Conversation:
    if not body.messages:
        raise InvalidRequest(
            "messages: got an empty list, expected at least one message", param="messages"
        )
    messages = [
        _plain(message, f"messages[{index}]") for index, message in enumerate(body.messages)
    ]
    enable_thinking = None if body.thinking is None else body.thinking.type == "enabled"
    if enable_thinking and model.formats.reasoning is None:
        body.ignored.add(
            "thinking", f"got the type 'enabled', but `{model.name}` does not support thinking"
        )
        enable_thinking = None
    functions = [convert_function(tool.function) for tool in body.tools or ()]
    return Conversation(
        messages,
        rendering=make_rendering(messages, model, continues=False, enable_thinking=enable_thinking),
        tools=make_tool_use(
            functions, CHOICES[body.tool_choice], model.limits, ignored=body.ignored
        ),
    )


def _form(response_format: CohereFormat | None) -> StructuredOutputs | None:
    """Returns the structured output options; None for free text."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None:
        return StructuredOutputs(json_object=True, given_as="response_format")
    return StructuredOutputs(json=response_format.json_schema, given_as="response_format")


def _plain(message: CohereMessage, where: str) -> dict[str, Any]:
    """Converts a message to a plain one; a tool plan becomes the message's text."""
    content: str | list[CohereBlock] | None = message.content
    content = message.tool_plan if content is None else content
    if content is None and message.role not in MAY_BE_EMPTY:
        raise InvalidRequest(f"{where}.content: field required", param=f"{where}.content")
    texts, thought = _blocks(content or "", message.role, f"{where}.content")
    plain: dict[str, Any] = {"role": message.role, "content": texts}
    if thought:
        plain["reasoning_content"] = thought
    if message.tool_calls:
        plain["tool_calls"] = [
            plain_call(call, f"{where}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _blocks(content: str | list[CohereBlock], role: str, where: str) -> tuple[str, str]:
    """Returns (text, thinking) of a message's content; documents found by tools become text."""
    if isinstance(content, str):
        return content, ""
    texts: list[str] = []
    thoughts: list[str] = []
    for index, block in enumerate(content):
        path = f"{where}[{index}]"
        if block.type == "thinking" and block.thinking is not None:
            check_role(role, "assistant", path)
            thoughts.append(block.thinking)
        elif block.type == "document" and block.document is not None:
            check_role(role, "tool", path)
            data = block.document.data
            texts.append(data if isinstance(data, str) else json.dumps(data, ensure_ascii=False))
        else:
            texts.append(block_text(block, path))
    return "\n".join(texts), "\n".join(thoughts)
