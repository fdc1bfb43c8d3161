"""/v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from octavo.api.errors import InvalidRequest, ServerError, shown
from octavo.api.outputs import RequestOutput
from octavo.api.transcription import Transcription, VoiceActivity
from octavo.frontend.input_processor import ParentRequest, RequestContext
from octavo.frontend.transcription import SpeechOptions, SpeechTask
from octavo.server.http.auth import get_request_context
from octavo.server.http.body import get_ignored
from octavo.server.http.connection import cancel_on_disconnect
from octavo.server.http.forms import FILE_FIELD, get_fields, get_file, open_form
from octavo.server.ignored import IgnoredFields, join_path
from octavo.server.output_streams import OutputStreams
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, get_service

MAX_BYTES = 512 << 20
"""Maximum file size: more than two hours of 16-bit stereo at 16 kHz."""
FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
GRANULARITIES = "timestamp_granularities[]"
FIELDS = (
    *("model", "language", "prompt", "response_format", "temperature", "stream"),
    GRANULARITIES,
)
CHUNKING = "chunking_strategy"
FRAMES_A_SECOND = 100
"""Frames per second, the unit of `seek` in OpenAI's segments."""
WITH_SEGMENTS = ("verbose_json", "srt", "vtt")
"""Formats with segments; their timestamps come from the model if it supports them."""
FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    FILE_FIELD: {"type": "string", "format": "binary"},
                    "model": {"type": "string"},
                    "language": {"type": "string"},
                    "prompt": {"type": "string"},
                    "response_format": {"type": "string", "enum": list(FORMATS)},
                    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
                    GRANULARITIES: {
                        "type": "array",
                        "items": {"type": "string", "enum": ["segment", "word"]},
                    },
                    CHUNKING: {"type": "string"},
                },
                "required": [FILE_FIELD, "model"],
            }
        }
    },
}
"""OpenAPI description of the form that `open_form` reads."""

router = APIRouter()


@router.post("/v1/audio/transcriptions", openapi_extra={"requestBody": FORM})
async def transcribe(
    request: Request, service: Annotated[Service, Depends(get_service)]
) -> Response:
    """Transcribes audio in the spoken language."""
    return await _answer(request, service, "transcribe")


@router.post("/v1/audio/translations", openapi_extra={"requestBody": FORM})
async def translate(
    request: Request, service: Annotated[Service, Depends(get_service)]
) -> Response:
    """Translates audio to English."""
    return await _answer(request, service, "translate")


async def _answer(request: Request, service: Service, task: SpeechTask) -> Response:
    async with open_form(
        request, max_bytes=MAX_BYTES, timeout_s=service.settings.request_timeout_s
    ) as form:
        fields, file = get_fields(form), get_file(form)
        granularities = [str(value) for value in form.getlist(GRANULARITIES)]
        if file is None:
            raise InvalidRequest(
                "file: got none, expected a WAV, FLAC, OGG or MP3 file", param=FILE_FIELD
            )
        data = await file.read()
    answer_format = _parse_format(fields, get_ignored(request))
    _check_granularities(granularities, answer_format)
    model = await service.model(fields.get("model", ""))
    options = SpeechOptions(
        language=fields.get("language") or None,
        task=task,
        temperature=_temperature(fields.get("temperature", "0")),
        timestamps=_timestamps(granularities, answer_format),
        words="word" in granularities,
        prompt=fields.get("prompt") or None,
        chunking=_chunking(fields),
    )
    heard = transcribe_file(model, data, options, get_request_context(request, None, None))
    transcription = await cancel_on_disconnect(request.receive, heard)
    return _format(transcription, answer_format, granularities)


async def transcribe_file(
    model: ServedModel, data: bytes, options: SpeechOptions, origin: RequestContext
) -> Transcription:
    """Transcribes audio; its windows count as one running request of the API key."""
    name = f"trsc-{secrets.token_hex(12)}"

    async def compute(requests: Sequence[ParentRequest]) -> list[RequestOutput]:
        params = requests[0].params
        return await OutputStreams.of_requests(
            model, requests, params, name, is_part=True
        ).results()

    model.record.start()
    try:
        transcription = await model.llm.transcribe(data, options, origin=origin, compute=compute)
    finally:
        model.record.stop()
    if transcription.error is not None:
        raise ServerError(transcription.error)
    return transcription


def _parse_format(fields: dict[str, str], ignored: IgnoredFields) -> str:
    """Checks the form's fields; returns the response format."""
    for name in fields:
        if name not in FIELDS and name.partition("[")[0] != CHUNKING:
            ignored.add(
                join_path("", name),
                f"not supported, expected {', '.join(FIELDS)} and file",
                hint="remove it",
            )
    if fields.get("stream", "false").lower() not in ("false", "0"):
        raise InvalidRequest(
            "stream: got true, streaming is not supported for transcriptions",
            param="stream",
            hint="omit stream",
        )
    response_format = fields.get("response_format", "json")
    if response_format not in FORMATS:
        raise InvalidRequest(
            f"response_format: got {shown(response_format)}, expected {', '.join(FORMATS)}",
            param="response_format",
        )
    return response_format


def _check_granularities(granularities: Sequence[str], answer_format: str) -> None:
    for granularity in granularities:
        if granularity not in ("segment", "word"):
            raise InvalidRequest(
                f"{GRANULARITIES}: got {shown(granularity)}, expected segment or word",
                param=GRANULARITIES,
            )
    if "word" in granularities and answer_format != "verbose_json":
        raise InvalidRequest(
            f"{GRANULARITIES}: got word with the response format {answer_format}, expected"
            " verbose_json, which has words",
            param=GRANULARITIES,
        )


def _timestamps(granularities: Sequence[str], answer_format: str) -> bool | None:
    """Returns whether segments need the model's timestamps; None: use them if the model supports
    them.
    """
    if "segment" in granularities:
        return True
    return None if answer_format in WITH_SEGMENTS else False


def _chunking(fields: dict[str, str]) -> VoiceActivity | None:
    """Returns the voice activity detection of a form: "auto", a JSON object, or a field for each
    key, as OpenAI's client sends it.
    """
    given = fields.get(CHUNKING) or None
    keys = {
        name.removeprefix(f"{CHUNKING}[").removesuffix("]"): value
        for name, value in fields.items()
        if name.startswith(f"{CHUNKING}[")
    }
    if given == "auto" and not keys:
        return VoiceActivity()
    if given is None and not keys:
        return None
    try:
        values: dict[str, Any] = {
            name: value if name == "type" else json.loads(value) for name, value in keys.items()
        }
        values |= {} if given is None else json.loads(given)
        if values.pop("type", None) != "server_vad":
            raise ValueError
        return VoiceActivity(**values)
    except (ValueError, TypeError, RecursionError):
        raise InvalidRequest(
            f"{CHUNKING}: got {shown(given or keys)}, expected auto, or an object with the type"
            " server_vad and threshold, prefix_padding_ms, silence_duration_ms",
            param=CHUNKING,
        ) from None


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise InvalidRequest(
            f"temperature: got {shown(text)}, expected a number from 0 to 1", param="temperature"
        )
    return value


def _format(
    transcription: Transcription, answer_format: str, granularities: Sequence[str]
) -> Response:
    if answer_format == "text":
        return PlainTextResponse(transcription.text + "\n")
    if answer_format == "srt":
        return PlainTextResponse(transcription.srt(), media_type="application/x-subrip")
    if answer_format == "vtt":
        return PlainTextResponse(transcription.vtt(), media_type="text/vtt")
    body: dict[str, Any] = {"text": transcription.text}
    if answer_format == "verbose_json":
        body |= {
            "task": transcription.task,
            "language": transcription.language,
            "duration": transcription.duration_s,
        }
        if "word" in granularities:
            body["words"] = [
                {"word": word.word, "start": word.start_s, "end": word.end_s}
                for word in transcription.words
            ]
    if answer_format == "verbose_json" and list(granularities) != ["word"]:
        body |= {
            "segments": [
                {
                    "id": segment.id,
                    "seek": round(segment.seek_s * FRAMES_A_SECOND),
                    "start": segment.start_s,
                    "end": segment.end_s,
                    "text": segment.text,
                    "tokens": segment.token_ids,
                }
                for segment in transcription.segments
            ],
        }
    return JSONResponse(body)
