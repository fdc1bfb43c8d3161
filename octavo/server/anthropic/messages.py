"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same engine.

Source: Anthropic's API reference. A key may come as x-api-key; any anthropic-version is taken.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from octavo.server.anthropic.answer import MessageAnswer, MessageStream
from octavo.server.anthropic.bodies import NAMES, CountTokensBody, MessagesBody
from octavo.server.anthropic.conversation import conversation_of
from octavo.server.auth import origin_of
from octavo.server.body import body_bytes, body_of
from octavo.server.state.service import Service, service_of
from octavo.server.turn import in_their_words, params_of, start_turn
from octavo.structured_outputs import StructuredOutputs

router = APIRouter()


@router.post("/v1/messages")
async def create_message(
    request: Request,
    service: Annotated[Service, Depends(service_of)],
    body: Annotated[MessagesBody, Depends(body_of(MessagesBody))],
) -> Response:
    model = await service.model(body.model)
    params = params_of(
        body, NAMES, model.llm.get_default_sampling_params(), structured_outputs=_form(body)
    )
    omits = body.thinking is not None and body.thinking.display == "omitted"
    answer = MessageAnswer(model.name, body.max_tokens, tells_thinking=not omits)
    origin = origin_of(request, None, body.metadata.user_id if body.metadata else None)
    stream = bool(body.stream)
    with in_their_words(NAMES):
        turn = await start_turn(
            model, conversation_of(body, model), params, answer.id, origin=origin, stream=stream
        )
    service.readings.keep(answer.id, turn.reading, body_bytes(request))
    headers = {"request-id": f"req_{secrets.token_hex(12)}"}
    if stream:
        return MessageStream(answer.events(turn), headers)
    made = answer.whole(turn, await turn.whole(request.receive))
    return Response(msgspec.json.encode(made), headers=headers, media_type="application/json")


def _form(body: MessagesBody) -> StructuredOutputs | None:
    """Returns the form that the answer is to have; None for any text."""
    found, name = body.output_format, "output_format"
    if found is None and body.output_config is not None:
        found, name = body.output_config.format, "output_config.format"
    return None if found is None else StructuredOutputs(json=found.schema_, given_as=name)


@router.post("/v1/messages/count_tokens")
async def count_tokens(
    service: Annotated[Service, Depends(service_of)],
    body: Annotated[CountTokensBody, Depends(body_of(CountTokensBody))],
) -> dict[str, Any]:
    """Counts the tokens of a conversation as the model's template writes it."""
    model = await service.model(body.model)
    prompt = await conversation_of(body, model).prompt(model)
    return {"input_tokens": len(prompt["prompt_token_ids"])}
