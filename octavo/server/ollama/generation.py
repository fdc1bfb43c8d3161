"""POST /api/chat and POST /api/generate.

Source: Ollama's API reference. A request without messages or prompt only loads the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from octavo.api.errors import InvalidRequest
from octavo.api.sampling_params import SamplingParams
from octavo.api.structured_outputs import StructuredOutputs
from octavo.frontend.arguments import Prompt
from octavo.server.conversation import Conversation
from octavo.server.http.auth import get_request_context, require_operator
from octavo.server.http.body import body_bytes, parse_body
from octavo.server.http.errors import use_api_names
from octavo.server.ignored import IgnoredFields
from octavo.server.images import Content, base64_source, image_part, join_parts, text_part
from octavo.server.ollama.bodies import (
    NAMES,
    UNBOUNDED,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    RunOptions,
)
from octavo.server.ollama.formatter import (
    LineStream,
    OllamaChatFormatter,
    OllamaFormatter,
    OllamaGenerateFormatter,
)
from octavo.server.ollama.keep_alive import apply_keep_alive, asks_to_unload
from octavo.server.ollama.names import find, known_name
from octavo.server.openai.messages import build_part
from octavo.server.openai.tools import convert_function
from octavo.server.output_parser import PLAIN, OutputParser
from octavo.server.output_streams import make_prompt
from octavo.server.plain_chat import make_params, make_rendering, refuse_values
from octavo.server.response_builder import send_response, start_response
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, get_service
from octavo.server.tool_use import make_tool_use, parse_arguments

router = APIRouter()


@router.post("/api/chat")
async def chat(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[OllamaChatBody, Depends(parse_body(OllamaChatBody))],
) -> Response:
    if not body.messages and asks_to_unload(body.keep_alive):
        return _unload(request, service, body, OllamaChatFormatter)
    model = await service.model(known_name(service, body.model))
    apply_keep_alive(request, model.uses, body.keep_alive)
    params = _params(body, model)
    formatter = OllamaChatFormatter(body.model, model, params)
    if not body.messages:
        return JSONResponse(formatter.loaded())
    conversation = replace(
        _conversation(_messages(body), body, model),
        tools=make_tool_use(
            [convert_function(tool.function) for tool in body.tools or ()],
            None,
            model.limits,
            ignored=body.ignored,
        ),
    )
    prompt = await conversation.prompt(model)
    parser = conversation.parser(model, prompt)
    return await _respond(request, service, body, formatter, prompt, parser=parser)


@router.post("/api/generate")
async def generate(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[OllamaGenerateBody, Depends(parse_body(OllamaGenerateBody))],
) -> Response:
    if not body.prompt and not body.suffix and asks_to_unload(body.keep_alive):
        return _unload(request, service, body, OllamaGenerateFormatter)
    model = await service.model(known_name(service, body.model))
    apply_keep_alive(request, model.uses, body.keep_alive)
    refuse_values(body, ["template", "context"])
    params = _params(body, model)
    formatter = OllamaGenerateFormatter(body.model, model, params)
    if not body.prompt and not body.suffix:
        return JSONResponse(formatter.loaded())
    has_template = model.tokenizer is not None and model.tokenizer.has_chat_template
    if body.suffix or body.raw or not has_template:
        refuse_values(body, ["images"])
        return await _respond(request, service, body, formatter, await _prompt(body, model))
    system = [{"role": "system", "content": body.system}] if body.system else []
    asked = _add_images(body.prompt or "", body.images)
    messages: list[dict[str, Any]] = [*system, {"role": "user", "content": asked}]
    conversation = _conversation(messages, body, model)
    prompt = await conversation.prompt(model)
    parser = conversation.parser(model, prompt)
    return await _respond(request, service, body, formatter, prompt, parser=parser)


async def _respond(
    request: Request,
    service: Service,
    body: OllamaBody,
    formatter: OllamaFormatter,
    prompt: Prompt,
    *,
    parser: OutputParser = PLAIN,
) -> Response:
    """Submits a prompt and returns the response, streamed unless the request disables it."""
    stream = body.stream is not False
    with use_api_names(NAMES):
        response = await start_response(
            formatter.model,
            [prompt],
            formatter.params,
            formatter,
            parser=parser,
            origin=get_request_context(request, None, None),
            stream=stream,
        )
    service.parsers.keep(formatter.id, parser, body_bytes(request))
    return await send_response(request, response, formatter, LineStream if stream else None)


def _unload(
    request: Request, service: Service, body: OllamaBody, kind: type[OllamaFormatter]
) -> Response:
    """Unloads a model as soon as no request uses it."""
    require_operator(request)
    slot = find(service, body.model)
    if slot.loaded is not None and not service.residency.may_unload(slot):
        raise HTTPException(
            409,
            f"the model `{slot.name}` stays loaded: it is pinned, or --load-on-demand is none"
            " (hint: unload it with POST /v1/models/unload)",
        )
    slot.uses.keep(0.0, by_request=True)
    return JSONResponse(kind.unloaded(body.model))


async def _prompt(body: OllamaGenerateBody, model: ServedModel) -> Prompt:
    """Returns the prompt of a generation without chat template: fill-in-the-middle, raw, or
    preceded by the system message.
    """
    text = body.prompt or ""
    if body.suffix:
        return await model.llm.infill_prompt(text, body.suffix)
    if body.system:
        text = f"{body.system}\n\n{text}"
    return await make_prompt(model.llm, text)


def _conversation(
    messages: list[dict[str, Any]], body: OllamaBody, model: ServedModel
) -> Conversation:
    enable_thinking = None if body.think is None else body.think is not False
    rendering = make_rendering(messages, model, continues=True, enable_thinking=enable_thinking)
    if isinstance(body.think, str):
        rendering = replace(
            rendering, variables={**rendering.variables, "reasoning_effort": body.think}
        )
    return Conversation(messages, rendering=rendering)


def _messages(body: OllamaChatBody) -> list[dict[str, Any]]:
    return [
        _convert_message(message, f"messages[{index}].content", body.ignored)
        for index, message in enumerate(body.messages or ())
    ]


def _add_images(text: str, images: Sequence[str] | None) -> Content:
    """Returns the text, preceded by its images."""
    if not images:
        return text
    return [*(image_part(base64_source(image)) for image in images), text_part(text)]


def _content(message: OllamaMessage, where: str, ignored: IgnoredFields) -> Content:
    text = message.content or ""
    if isinstance(text, str):
        return _add_images(text, message.images)
    parts = [
        build_part(part, f"{where}[{index}]", message.role, ignored)
        for index, part in enumerate(text)
    ]
    return join_parts([*(image_part(base64_source(one)) for one in message.images or ()), *parts])


def _convert_message(message: OllamaMessage, where: str, ignored: IgnoredFields) -> dict[str, Any]:
    """Converts a message to a plain one."""
    content = _content(message, where, ignored)
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.thinking is not None:
        plain["reasoning_content"] = message.thinking
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": parse_arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_name is not None:
        plain["name"] = message.tool_name
    return plain


def _params(body: OllamaBody, model: ServedModel) -> SamplingParams:
    """Checks the fields common to all requests; returns the SamplingParams."""
    for name in ("truncate", "shift"):
        if getattr(body, name):
            body.ignored.add(name)
    _check_thinking(body, model)
    options = body.options or RunOptions.model_validate({})
    _check_context(body, options, model)
    others: dict[str, Any] = {
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "structured_outputs": _parse_format(body.format),
    }
    if options.num_predict in UNBOUNDED:
        others["max_tokens"] = None
    return make_params(options, NAMES, model.llm.get_default_chat_params(), **others)


def _parse_format(output_format: str | dict[str, Any] | None) -> StructuredOutputs | None:
    """Returns the structured output options; None for free text."""
    if not output_format:
        return None
    if output_format == "json":
        return StructuredOutputs(json_object=True, given_as="format")
    if isinstance(output_format, dict):
        return StructuredOutputs(json=output_format, given_as="format")
    raise InvalidRequest(
        f"format: got {output_format!r}, expected 'json' or a JSON schema", param="format"
    )


def _check_thinking(body: OllamaBody, model: ServedModel) -> None:
    if body.think in (None, False):
        return
    if model.formats.reasoning is None:
        raise InvalidRequest(
            f'think: got {body.think!r}, but "{model.name}" does not support thinking',
            hint="send false",
            param="think",
        )
    variables = frozenset() if model.tokenizer is None else model.tokenizer.template_variables
    if isinstance(body.think, str) and "reasoning_effort" not in variables:
        body.ignored.add(
            "think",
            f"got {body.think!r}, but the model's chat template does not support effort levels",
            hint="send true",
        )


def _check_context(body: OllamaBody, options: RunOptions, model: ServedModel) -> None:
    """Reports num_ctx as ignored if it exceeds the model's context. (A prompt that is too long is
    an error of its own.)
    """
    longest = model.llm.info.max_model_len
    if options.num_ctx is not None and options.num_ctx > longest:
        body.ignored.add(
            "options.num_ctx",
            f"got {options.num_ctx}, expected at most {longest}, the context of `{model.name}`",
            hint="remove it, or start the server with a larger --max-model-len",
        )
