"""POST /v1/messages and /v1/messages/count_tokens.

Source: Anthropic's API reference. The key may be sent as x-api-key; any anthropic-version is
accepted.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from octavo.api.structured_outputs import StructuredOutputs
from octavo.server.anthropic.bodies import NAMES, CountTokensBody, MessagesBody
from octavo.server.anthropic.conversation import parse_conversation
from octavo.server.anthropic.formatter import MessageFormatter, MessageStream
from octavo.server.http.auth import get_request_context
from octavo.server.http.body import body_bytes, parse_body
from octavo.server.http.errors import use_api_names
from octavo.server.plain_chat import make_params
from octavo.server.response_builder import new_hex_id, send_response, start_chat
from octavo.server.state.service import Service, get_service

router = APIRouter()


@router.post("/v1/messages")
async def create_message(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[MessagesBody, Depends(parse_body(MessagesBody))],
) -> Response:
    model = await service.model(body.model)
    params = make_params(
        body, NAMES, model.llm.get_default_sampling_params(), structured_outputs=_parse_format(body)
    )
    omits = body.thinking is not None and body.thinking.display == "omitted"
    formatter = MessageFormatter(model.name, body.max_tokens, shows_reasoning=not omits)
    origin = get_request_context(request, None, body.metadata.user_id if body.metadata else None)
    with use_api_names(NAMES):
        conversation = parse_conversation(body, model)
        response = await start_chat(
            model, conversation, params, formatter, origin=origin, stream=bool(body.stream)
        )
    service.parsers.keep(formatter.id, response.parser, body_bytes(request))
    headers = {"request-id": new_hex_id("req_")}
    stream_type = MessageStream if body.stream else None
    return await send_response(request, response, formatter, stream_type, headers)


def _parse_format(body: MessagesBody) -> StructuredOutputs | None:
    """Returns the structured output options; None for free text."""
    output_format, name = body.output_format, "output_format"
    if output_format is None and body.output_config is not None:
        output_format, name = body.output_config.format, "output_config.format"
    return (
        None
        if output_format is None
        else StructuredOutputs(json=output_format.schema_, given_as=name)
    )


@router.post("/v1/messages/count_tokens")
async def count_tokens(
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[CountTokensBody, Depends(parse_body(CountTokensBody))],
) -> dict[str, Any]:
    """Counts the prompt tokens of a conversation."""
    model = await service.model(body.model)
    prompt = await parse_conversation(body, model).prompt(model)
    return {"input_tokens": len(prompt["prompt_token_ids"])}
