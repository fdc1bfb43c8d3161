"""/v1/realtime transcribes turns as they end, with the events of OpenAI's Realtime API."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from octavo import LLM
from octavo.api.errors import Overloaded
from octavo.audio.wav import make_wav
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.server.state.service import Service
from octavo.server.state.slot import EngineSlot
from octavo.utils.progress import quiet
from tests.support.live_server import LiveServer
from tests.support.tiny_whisper import tiny_whisper

RATE = 24_000
TRANSCRIPTION = "conversation.item.input_audio_transcription"


def burst(seed: int, seconds: float) -> np.ndarray:
    """Returns loud noise, which is speech to an energy detector."""
    drawn = np.random.default_rng(seed).standard_normal(int(RATE * seconds)) * 0.2
    return (drawn.clip(-1, 1) * 32_767).astype("<i2")


PAUSE = np.zeros(RATE, "<i2")
TURNS = (burst(1, 1.5), burst(2, 2.0))


@pytest.fixture(scope="module")
def ear() -> Iterator[LiveServer]:
    server = LiveServer(
        str(tiny_whisper()), "--max-model-len=64", "--served-model-name=ear", "--api-key=k"
    )
    yield server
    assert server.stop() == 0


def opened(server: LiveServer, key: str = "k", **options: Any) -> ClientConnection:
    url = server.url.replace("http", "ws") + "/v1/realtime?model=ear&intent=transcription"
    return connect(url, additional_headers={"Authorization": f"Bearer {key}"}, **options)


def send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def say(socket: ClientConnection, samples: np.ndarray) -> None:
    """Sends audio in pieces of a tenth of a second."""
    for piece in np.array_split(samples, max(1, len(samples) // 2400)):
        audio = base64.b64encode(piece.tobytes()).decode()
        send(socket, "input_audio_buffer.append", audio=audio)


def receive(socket: ClientConnection) -> dict[str, Any]:
    event = json.loads(socket.recv(timeout=60))
    assert event.pop("event_id").startswith("event_")
    return dict(event)


def test_turns_are_transcribed_as_they_end(ear: LiveServer) -> None:
    with opened(ear) as socket:
        assert receive(socket)["session"]["type"] == "transcription"
        session = {"type": "transcription", "audio": {"input": {}}}
        session["audio"]["input"]["transcription"] = {"model": "ear", "language": "en"}
        send(socket, "session.update", session=session)
        updated = receive(socket)
        assert updated["type"] == "session.updated"
        assert updated["session"]["audio"]["input"]["turn_detection"]["type"] == "server_vad"
        say(socket, PAUSE)
        texts, before = [], None
        for turn in TURNS:
            say(socket, np.concatenate([turn, PAUSE]))
            started, stopped, committed = (receive(socket) for _ in range(3))
            assert started["type"] == "input_audio_buffer.speech_started"
            assert stopped["type"] == "input_audio_buffer.speech_stopped"
            length_ms = stopped["audio_end_ms"] - started["audio_start_ms"]
            assert 0 <= length_ms - len(turn) / RATE * 1000 - 300 - 500 <= 250
            assert committed["previous_item_id"] == before
            before = committed["item_id"]
            event = receive(socket)
            while event["type"] == f"{TRANSCRIPTION}.delta":
                texts.append(event["delta"])
                event = receive(socket)
            assert event["type"] == f"{TRANSCRIPTION}.completed"
            assert event["item_id"] == before and event["usage"]["type"] == "duration"
            assert event["transcript"] == texts[-1]


def test_a_client_commits_turns_itself(ear: LiveServer) -> None:
    """The text is that of a file with the same audio."""
    with LLM(str(tiny_whisper()), report=quiet, threads=1) as llm:
        file = make_wav(TURNS[0].astype(np.float32) / 32_768, RATE)
        (wanted,) = llm.transcribe(file, use_tqdm=False)
    with opened(ear) as socket:
        receive(socket)
        session = {"input_audio_format": "pcm16", "turn_detection": None}
        send(socket, "transcription_session.update", session=session)
        assert receive(socket)["session"]["audio"]["input"]["turn_detection"] is None
        say(socket, TURNS[1])
        send(socket, "input_audio_buffer.clear")
        assert receive(socket)["type"] == "input_audio_buffer.cleared"
        say(socket, TURNS[0])
        send(socket, "input_audio_buffer.commit")
        assert receive(socket)["type"] == "input_audio_buffer.committed"
        event = receive(socket)
        if event["type"] == f"{TRANSCRIPTION}.delta":
            event = receive(socket)
        assert event["transcript"] == wanted.text.strip()


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"type": "response.create"}, "type: got 'response.create', expected session.update"),
        ({"type": "input_audio_buffer.append", "audio": "%"}, "expected base64 of 16-bit"),
        ({"type": "input_audio_buffer.commit"}, "got no audio since the last commit"),
        (
            {"type": "session.update", "session": {"type": "realtime"}},
            "session.type: got 'realtime', expected transcription",
        ),
        (
            {"type": "session.update", "session": {"audio": {"input": {"format": "g711"}}}},
            "expected audio/pcm at 24,000",
        ),
        (
            {"type": "session.update", "session": {"turn_detection": {"threshold": 3}}},
            "threshold: got 3, expected a number from 0 to 1",
        ),
        (
            {"type": "session.update", "session": {"input_audio_transcription": {"model": "x"}}},
            "x",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said_and_the_connection_goes_on(
    ear: LiveServer, event: dict[str, Any], said: str
) -> None:
    with opened(ear) as socket:
        receive(socket)
        socket.send("no JSON")
        assert "expected a JSON object" in receive(socket)["error"]["message"]
        socket.send(json.dumps(event | {"event_id": "mine"}))
        error = receive(socket)["error"]
        assert said in error["message"] and error["event_id"] == "mine"
        assert error["type"] == "invalid_request_error"
        send(socket, "session.update", session={})
        assert receive(socket)["type"] == "session.updated"


def test_an_unexpected_error_fails_its_turn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection goes on, and the client is not told details."""
    errors = iter([RuntimeError("a secret"), Overloaded("busy")])

    async def model(self: Service, name: str | None = None) -> None:
        raise next(errors)

    monkeypatch.setattr(Service, "model", model)
    http = TestClient(create_app(EngineSlot(), ServerSettings()))
    with http.websocket_connect("/v1/realtime") as socket:
        audio = base64.b64encode(TURNS[0].tobytes()).decode()
        socket.send_json({"type": "session.update", "session": {"turn_detection": None}})
        for _ in range(2):
            socket.send_json({"type": "input_audio_buffer.append", "audio": audio})
            socket.send_json({"type": "input_audio_buffer.commit"})
        failed: list[dict[str, Any]] = []
        while len(failed) < 2:
            event = socket.receive_json()
            failed += [event["error"]] if event["type"].endswith(".failed") else []
    assert failed[0]["message"] == "Internal server error" and failed[0]["type"] == "server_error"
    assert failed[1]["message"] == "busy"


def test_a_wrong_key_and_plain_http_are_refused(ear: LiveServer) -> None:
    with pytest.raises(InvalidStatus, match="403"), opened(ear, "other"):
        pass
    url = ear.url.replace("http", "ws") + "/v1/realtime?model=ear"
    protocols = ["realtime", "openai-insecure-api-key.k"]
    with connect(url, subprotocols=protocols) as socket:
        assert socket.subprotocol == "realtime"
        assert receive(socket)["type"] == "session.created"
    answer = httpx.get(f"{ear.url}/v1/realtime", headers={"Authorization": "Bearer k"})
    assert answer.status_code == 426 and "octavo[audio]" in answer.text
