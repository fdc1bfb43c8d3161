"""/v1/realtime: transcribes audio over a WebSocket as it is spoken, in the events of OpenAI's
Realtime API for sessions of type `transcription`.

The audio is split into turns by voice activity detection, or by the client's commits; each turn is
transcribed like a file of `/v1/audio/transcriptions`, in order.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, HTTPException, WebSocket, WebSocketDisconnect
from numpy.typing import NDArray

from octavo.api.errors import InvalidRequest, OctavoError, shown
from octavo.api.transcription import VoiceActivity
from octavo.audio.turn_detector import TurnDetector
from octavo.audio.wav import make_wav
from octavo.frontend.transcription import SpeechOptions
from octavo.server.http.auth import get_request_context
from octavo.server.http.errors import make_fault
from octavo.server.openai.audio import transcribe_file
from octavo.server.state.request_record import RequestRecord, get_record
from octavo.server.state.service import Service

WIRE_RATE = 24_000
"""Samples per second of `audio/pcm`, 16-bit and mono."""
MAX_TURN_S = 30.0
"""Longest turn that voice activity detection waits for, in seconds."""
MAX_UNCOMMITTED_S = 600.0
"""Longest audio without a commit, in seconds."""
MAX_WAITING_TURNS = 16
"""Turns that may wait for their transcripts; the client's audio is read no further until then."""
DEFAULT_DETECTION = VoiceActivity(silence_duration_ms=500)
"""Voice activity detection by default; the pause is that of OpenAI's API."""

SERVER_VAD = "server_vad"
TEXT_OPTIONS = ("model", "language", "prompt")
PROTOCOL = "realtime"
"""WebSocket protocol that OpenAI's clients in browsers offer."""

logger = logging.getLogger(__name__)
router = APIRouter()


@router.websocket("/v1/realtime")
async def realtime(socket: WebSocket) -> None:
    """Transcribes speech as it arrives."""
    service: Service = socket.app.state.service
    offered = socket.scope.get("subprotocols", [])
    await socket.accept(subprotocol=PROTOCOL if PROTOCOL in offered else None)
    session = Session(socket, service)
    with suppress(WebSocketDisconnect):
        await session.run(socket.query_params.get("model", ""))


@router.get("/v1/realtime")
async def require_websocket() -> None:
    """Reports that this path needs a WebSocket."""
    raise HTTPException(
        426,
        "expected a WebSocket (hint: connect with wss:// or ws://; if you did, run"
        " `pip install 'octavo[audio]'` on the server)",
    )


class SessionOptions(msgspec.Struct, frozen=True):
    """Options that a client may change."""

    model: str = ""
    language: str | None = None
    prompt: str | None = None
    turn_detection: VoiceActivity | None = DEFAULT_DETECTION
    """None: the client commits each turn."""

    def to_json(self, session_id: str) -> dict[str, Any]:
        activity = self.turn_detection
        detection = None if activity is None else {"type": SERVER_VAD, **asdict(activity)}
        transcription = {"model": self.model, "language": self.language, "prompt": self.prompt}
        return {
            "id": session_id,
            "object": "realtime.session",
            "type": "transcription",
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": WIRE_RATE},
                    "transcription": transcription,
                    "turn_detection": detection,
                }
            },
        }


@dataclass(frozen=True, slots=True)
class Turn:
    """Audio to transcribe."""

    item_id: str
    samples: NDArray[np.float32]
    options: SessionOptions


@dataclass(slots=True)
class AudioBuffer:
    """The audio since the last commit, and where it begins in the session."""

    samples: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.samples)

    def add(self, samples: NDArray[np.float32]) -> None:
        self.samples = np.concatenate([self.samples, samples])

    def take(self, start: int, end: int) -> NDArray[np.float32]:
        """Removes everything before `end`; returns the samples from `start` on."""
        taken = self.samples[max(start - self.start, 0) : end - self.start]
        self.samples, self.start = self.samples[end - self.start :], end
        return taken


class Session:
    """One connection."""

    def __init__(self, socket: WebSocket, service: Service) -> None:
        self._socket = socket
        self._service = service
        self._context = get_request_context(socket, None, None)
        opened = get_record(socket.scope)
        self._owner, self._account = opened.owner, opened.account
        self._id = f"sess_{secrets.token_hex(12)}"
        self._options = SessionOptions()
        self._buffer = AudioBuffer()
        self._detector: TurnDetector | None = None
        self._offset = 0
        """Sample of the session at which the detector started."""
        self._turn: tuple[str, int] | None = None
        """Item id and first sample of the turn that is being spoken."""
        self._last_item: str | None = None
        self._turns: asyncio.Queue[Turn] = asyncio.Queue(MAX_WAITING_TURNS)

    async def run(self, model: str) -> None:
        """Serves the connection until the client closes it."""
        self._set(msgspec.structs.replace(self._options, model=model))
        await self._send("session.created", session=self._options.to_json(self._id))
        worker = asyncio.create_task(self._transcribe_turns())
        try:
            while True:
                await self._handle(await self._socket.receive_text())
        finally:
            worker.cancel()

    async def _handle(self, text: str) -> None:
        """Handles an event of the client; an invalid one is answered with an error."""
        event_id = None
        try:
            event = _parse_event(text)
            event_id = event.get("event_id")
            kind = event["type"]
            if kind in ("session.update", "transcription_session.update"):
                self._set(await self._read_options(_get_table(event, "session", "session")))
                await self._send("session.updated", session=self._options.to_json(self._id))
            elif kind == "input_audio_buffer.append":
                await self._append(_decode(event.get("audio")))
            elif kind == "input_audio_buffer.commit":
                await self._commit()
            elif kind == "input_audio_buffer.clear":
                self._clear()
                await self._send("input_audio_buffer.cleared")
            else:
                raise InvalidRequest(
                    f"type: got {shown(kind)}, expected session.update, input_audio_buffer.append,"
                    " input_audio_buffer.commit or input_audio_buffer.clear",
                    param="type",
                )
        except OctavoError as error:
            await self._send("error", error={**_describe(error), "event_id": event_id})

    # -- options -----------------------------------------------------------------------------------

    async def _read_options(self, session: dict[str, Any]) -> SessionOptions:
        """Reads `session` in the form of session.update, or of transcription_session.update."""
        if session.get("type", "transcription") != "transcription":
            raise InvalidRequest(
                f"session.type: got {shown(session['type'])}, expected transcription",
                hint="speech output is not supported",
                param="session.type",
            )
        audio = _get_table(session, "audio", "session.audio")
        given = _get_table(audio, "input", "session.audio.input")
        names = {
            "input_audio_format": "format",
            "input_audio_transcription": "transcription",
            "turn_detection": "turn_detection",
        }
        given = given or {ours: session[name] for name, ours in names.items() if name in session}
        _check_format(given.get("format"))
        wanted = _get_table(given, "transcription", "transcription")
        changes = {name: _get_text(wanted, name) for name in wanted if name in TEXT_OPTIONS}
        if "model" in changes:
            changes["model"] = changes["model"] or ""
        options = msgspec.structs.replace(self._options, **changes)
        if "turn_detection" in given:
            detection = _read_detection(given["turn_detection"])
            options = msgspec.structs.replace(options, turn_detection=detection)
        # An unknown name is an error now, not with the first turn.
        await self._service.residency.find(options.model or None)
        return options

    def _set(self, options: SessionOptions) -> None:
        """Sets the options, and discards the audio that is not committed."""
        self._options, activity = options, options.turn_detection
        self._detector = None
        self._clear()
        if activity is not None:
            self._detector = TurnDetector(
                WIRE_RATE,
                threshold=activity.threshold,
                padding_s=activity.prefix_padding_ms / 1000,
                silence_s=activity.silence_duration_ms / 1000,
                max_turn_s=MAX_TURN_S,
            )
        self._offset = self._buffer.end

    # -- audio -------------------------------------------------------------------------------------

    async def _append(self, samples: NDArray[np.float32]) -> None:
        if len(self._buffer.samples) + len(samples) > MAX_UNCOMMITTED_S * WIRE_RATE:
            raise InvalidRequest(
                f"audio: got more than {MAX_UNCOMMITTED_S:.0f} s without a commit",
                hint="send input_audio_buffer.commit, or use turn_detection",
                param="audio",
            )
        self._buffer.add(samples)
        if self._detector is None:
            return
        for event in self._detector.add(samples):
            at = self._offset + event.sample
            if event.kind == "started":
                self._turn = (f"item_{secrets.token_hex(12)}", at)
                await self._send(
                    "input_audio_buffer.speech_started",
                    audio_start_ms=_milliseconds(at),
                    item_id=self._turn[0],
                )
            elif self._turn is not None:
                await self._send(
                    "input_audio_buffer.speech_stopped",
                    audio_end_ms=_milliseconds(at),
                    item_id=self._turn[0],
                )
                await self._end_turn(*self._turn, at)
        self._drop_silence()

    def _drop_silence(self) -> None:
        """Removes audio before which no turn can begin any more."""
        activity = self._options.turn_detection
        if self._turn is None and activity is not None:
            kept_s = activity.prefix_padding_ms / 1000 + 1
            first = max(self._buffer.end - round(kept_s * WIRE_RATE), self._buffer.start)
            self._buffer.take(first, first)

    async def _commit(self) -> None:
        if not len(self._buffer.samples):
            raise InvalidRequest("input_audio_buffer.commit: got no audio since the last commit")
        if self._detector is not None:
            self._detector.end_turn()
        item_id, start = self._turn or (f"item_{secrets.token_hex(12)}", self._buffer.start)
        await self._end_turn(item_id, start, self._buffer.end)

    def _clear(self) -> None:
        self._turn = None
        self._buffer.take(self._buffer.end, self._buffer.end)
        if self._detector is not None:
            self._detector.end_turn()

    async def _end_turn(self, item_id: str, start: int, end: int) -> None:
        samples = self._buffer.take(start, end)
        self._turn = None
        await self._send(
            "input_audio_buffer.committed", item_id=item_id, previous_item_id=self._last_item
        )
        self._last_item = item_id
        await self._turns.put(Turn(item_id, samples, self._options))

    # -- transcripts -------------------------------------------------------------------------------

    async def _transcribe_turns(self) -> None:
        """Transcribes turns one after another until it is cancelled."""
        while True:
            turn = await self._turns.get()
            event = "conversation.item.input_audio_transcription"
            item = {"item_id": turn.item_id, "content_index": 0}
            try:
                text = await self._transcribe(turn)
            except Exception as error:
                if not isinstance(error, OctavoError):
                    logger.exception("a turn could not be transcribed")
                await self._send(f"{event}.failed", **item, error=_describe(error))
                continue
            if text:
                await self._send(f"{event}.delta", **item, delta=text)
            usage = {"type": "duration", "seconds": round(len(turn.samples) / WIRE_RATE, 3)}
            await self._send(f"{event}.completed", **item, transcript=text, usage=usage)

    async def _transcribe(self, turn: Turn) -> str:
        record = RequestRecord(owner=self._owner, account=self._account)
        if self._account is not None:
            self._account.count_request()
        try:
            model = await replace(self._service, record=record).model(turn.options.model or None)
            options = SpeechOptions(language=turn.options.language, prompt=turn.options.prompt)
            data = make_wav(turn.samples, WIRE_RATE)
            transcription = await transcribe_file(model, data, options, self._context)
        finally:
            record.release()
        return transcription.text.strip()

    async def _send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "event_id": f"event_{secrets.token_hex(12)}", **fields}
        await self._socket.send_text(json.dumps(event))


def _parse_event(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise InvalidRequest("got no event, expected a JSON object with a type")
    return event


def _decode(audio: object) -> NDArray[np.float32]:
    """Decodes base64 of 16-bit samples; raises InvalidRequest if it is not that."""
    try:
        data = base64.b64decode(audio if isinstance(audio, str) else "?", validate=True)
    except (binascii.Error, ValueError):
        data = b"?"
    if len(data) % 2:
        raise InvalidRequest(
            f"audio: got {shown(audio)}, expected base64 of 16-bit little-endian samples",
            param="audio",
        )
    return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32_768)


def _get_text(values: dict[str, Any], name: str) -> str | None:
    """Returns an option of the transcription; raises InvalidRequest if it is not a text."""
    value = values[name]
    if value is not None and not isinstance(value, str):
        param = f"transcription.{name}"
        raise InvalidRequest(f"{param}: got {shown(value)}, expected a string", param=param)
    return value


def _check_format(given: object) -> None:
    """Raises InvalidRequest for another format than 16-bit samples at 24 kHz."""
    accepted = (None, "pcm16", {"type": "audio/pcm"}, {"type": "audio/pcm", "rate": WIRE_RATE})
    if given not in accepted:
        raise InvalidRequest(
            f"format: got {shown(given)}, expected audio/pcm at {WIRE_RATE:,} samples per second",
            param="format",
        )


def _read_detection(given: object) -> VoiceActivity | None:
    if given is None:
        return None
    values = dict(given) if isinstance(given, dict) else {"type": given}
    kind = values.pop("type", SERVER_VAD)
    names = [option.name for option in fields(VoiceActivity)]
    if kind != SERVER_VAD or not set(values) <= {*names, "create_response", "interrupt_response"}:
        raise InvalidRequest(
            f"turn_detection: got {shown(given)}, expected null, or an object with the type"
            f" {SERVER_VAD} and {', '.join(names)}",
            param="turn_detection",
        )
    kept: dict[str, Any] = {name: values[name] for name in names if name in values}
    activity = replace(DEFAULT_DETECTION, **kept)
    activity.check("turn_detection")
    return activity


def _get_table(values: dict[str, Any], name: str, param: str) -> dict[str, Any]:
    """Returns an object; {} if it is missing or null."""
    found = values.get(name)
    if found is not None and not isinstance(found, dict):
        raise InvalidRequest(f"{param}: got {shown(found)}, expected an object", param=param)
    return found or {}


def _describe(error: Exception) -> dict[str, Any]:
    """Returns an error as OpenAI's events describe it."""
    fault = make_fault(error)
    return {
        "type": "invalid_request_error" if fault.status < 500 else "server_error",
        "code": fault.kind,
        "message": fault.message,
        "param": fault.param,
    }


def _milliseconds(sample: int) -> int:
    return round(sample * 1000 / WIRE_RATE)
