"""POST /tokenize, /detokenize and /apply-template, GET /tokenizer_info.

Fields and responses are vLLM's and llama.cpp's. The engine is not involved, and texts may exceed
the context.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Response

from octavo.api.errors import InvalidRequest
from octavo.api.sampling_options import INT32_MAX
from octavo.frontend.prompt_inputs import Truncation
from octavo.server.fields import field, required
from octavo.server.http.body import Body, parse_body
from octavo.server.openai.bodies import FLAG, ConversationBody, TokenId
from octavo.server.openai.message_bodies import Message
from octavo.server.openai.messages import plain_messages
from octavo.server.openai.rendering import make_rendering
from octavo.server.output_streams import fit_messages, make_chat_prompt
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, get_service
from octavo.text.ports import Tokenizer

ANY_LENGTH = Truncation(INT32_MAX)
"""A truncation limit that is never reached, so that texts longer than the context are not rejected.
"""

router = APIRouter()


class TokenizeBody(ConversationBody):
    """Body of POST /tokenize: one of prompt, content and messages."""

    model: str | None = field("the name of a model", "model whose tokenizer is used")
    messages: list[Message] | None = field(  # type: ignore[assignment]
        "a list of messages", "a conversation to render first", by_path=True
    )
    prompt: str | None = field("a string", "text to tokenize (vLLM's name)")
    content: str | None = field("a string", "text to tokenize (llama.cpp's name)")
    add_special_tokens: bool | None = field(FLAG, "add special tokens; null: true with prompt only")
    add_special: bool | None = field(
        FLAG, "llama.cpp's name of add_special_tokens", rules={"same_as": "add_special_tokens"}
    )
    parse_special: bool = field(FLAG, "parse special tokens in the text", default=True)
    return_token_strs: bool = field(FLAG, "return the tokens as text", default=False)
    with_pieces: bool = field(FLAG, "return each token as an id and its text", default=False)


class DetokenizeBody(Body):
    model: str | None = field("the name of a model", "model whose tokenizer is used")
    tokens: list[TokenId] = required("a list of token ids", "token ids to convert to text")
    skip_special_tokens: bool = field(FLAG, "omit special tokens", default=False)


class ApplyTemplateBody(ConversationBody):
    model: str | None = field("the name of a model", "model whose chat template is used")


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[TokenizeBody, Depends(parse_body(TokenizeBody))],
) -> Response:
    """Returns the token ids of a text or a conversation."""
    model = await service.model(body.model)
    tokenizer = model.llm.get_tokenizer()
    token_ids = await _token_ids(body, model, tokenizer, service)
    pieces = [_piece(tokenizer, one) for one in token_ids] if body.with_pieces else token_ids
    answer = {
        "count": len(token_ids),
        "max_model_len": model.llm.info.max_model_len,
        "tokens": pieces,
        "token_strs": [tokenizer.token_text(one) for one in token_ids]
        if body.return_token_strs
        else None,
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[DetokenizeBody, Depends(parse_body(DetokenizeBody))],
) -> dict[str, str]:
    """Returns the text of token ids, under vLLM's field name and llama.cpp's."""
    model = await service.model(body.model)
    tokenizer = model.llm.get_tokenizer()
    highest = model.llm.info.vocab_size - 1
    for token_id in body.tokens:
        if not 0 <= token_id <= highest:
            raise InvalidRequest(
                f"tokens: got the token id {token_id}, expected 0 to {highest}", param="tokens"
            )
    text = await asyncio.to_thread(
        tokenizer.decode, body.tokens, skip_special_tokens=body.skip_special_tokens
    )
    return {"prompt": text, "content": text}


@router.post("/apply-template")
@router.post("/v1/apply-template")
async def apply_template(
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[ApplyTemplateBody, Depends(parse_body(ApplyTemplateBody))],
) -> dict[str, str]:
    """Renders a conversation with the chat template."""
    model = await service.model(body.model)
    rendering = make_rendering(body, model, service.settings)
    messages = fit_messages(
        model.llm, plain_messages(body.messages, ignored=body.ignored), rendering
    )
    return {"prompt": await asyncio.to_thread(model.llm.render_chat, messages, rendering)}


@router.get("/tokenizer_info")
@router.get("/v1/tokenizer_info")
async def tokenizer_info(
    service: Annotated[Service, Depends(get_service)],
    model: Annotated[str | None, Query(description="a model's name")] = None,
) -> dict[str, Any]:
    """Describes a model's tokenizer and its chat template's variables."""
    served = await service.model(model)
    tokenizer = served.llm.get_tokenizer()
    return {
        "model": served.name,
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "max_model_len": served.llm.info.max_model_len,
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "special_tokens": {
            tokenizer.token_text(one): one for one in sorted(tokenizer.special_token_ids)
        },
        **tokenizer.named_special_tokens,
        "chat_template": tokenizer.chat_template,
        "template_variables": sorted(tokenizer.template_variables),
        "infill_format": tokenizer.infill_format,
    }


async def _token_ids(
    body: TokenizeBody, model: ServedModel, tokenizer: Tokenizer, service: Service
) -> list[int]:
    fields = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(fields) != 1:
        raise InvalidRequest(
            f"prompt: expected exactly one of prompt, content and messages, got {len(fields)}",
            param="prompt",
        )
    asked = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    if body.messages is not None:
        rendering = make_rendering(body, model, service.settings, add_special_tokens=bool(asked))
        prompt = await make_chat_prompt(
            model.llm,
            plain_messages(body.messages, ignored=body.ignored),
            cache_salt=None,
            rendering=rendering,
            truncation=ANY_LENGTH,
        )
        return list(prompt["prompt_token_ids"])
    return await asyncio.to_thread(
        tokenizer.encode,
        body.prompt if body.prompt is not None else body.content or "",
        add_special_tokens=fields == ["prompt"] if asked is None else asked,
        allow_special_text=body.parse_special,
    )


def _piece(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    """Returns a token with its text, or its bytes if they are not valid UTF-8."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return {"id": token_id, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(piece)}
