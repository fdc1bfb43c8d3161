"""/v1/audio/transcriptions gives LLM.transcribe's texts in OpenAI's forms, and says what is wrong
with a sound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo import LLM
from octavo.progress import quiet
from octavo.transcription import Transcription
from tests.support.live_server import LiveServer
from tests.support.tiny_whisper import noise, tiny_whisper

PATH = "/v1/audio/transcriptions"
_, SOUND = noise(1, 3.0)


@pytest.fixture(scope="module")
def ear() -> Iterator[LiveServer]:
    server = LiveServer(str(tiny_whisper()), "--max-model-len=64", "--served-model-name=ear")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def wanted() -> Transcription:
    with LLM(str(tiny_whisper()), report=quiet, threads=1) as llm:
        return llm.transcribe(SOUND, use_tqdm=False)[0]


def test_openais_client_gets_the_text_of_transcribe(ear: LiveServer, wanted: Transcription) -> None:
    with ear.openai() as client:

        def made(**more: Any) -> Any:
            file = ("speech.wav", SOUND)
            return client.audio.transcriptions.create(model="ear", file=file, **more)

        assert made().text == wanted.text
        assert made(response_format="text").strip() == wanted.text.strip()
        assert made(response_format="srt") == wanted.srt()
        assert made(response_format="vtt") == wanted.vtt()
        verbose = made(response_format="verbose_json", language="en")
        assert (verbose.text, float(verbose.duration)) == (wanted.text, 3.0)
        assert [one.tokens for one in verbose.segments] == [
            one.token_ids for one in wanted.segments
        ]


BAD: dict[str, tuple[bytes | None, dict[str, str], str]] = {
    "empty": (b"", {}, "got an empty file"),
    "truncated": (SOUND[:-1000], {}, "it is cut off"),
    "no sound": (b"hello" * 100, {}, "got a file that is no WAV"),
    "no file": (None, {}, "needed is a WAV file"),
    "format": (SOUND, {"response_format": "xml"}, "response_format: got 'xml'"),
    "temperature": (SOUND, {"temperature": "hot"}, "temperature: got 'hot'"),
    "language": (SOUND, {"language": "xx"}, "language: got 'xx', allowed are en"),
    "unknown field": (SOUND, {"prompt": "x"}, "prompt: not supported here"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_a_400_that_says_what_to_do(ear: LiveServer, name: str) -> None:
    data, fields, message = BAD[name]
    parts: list[Any] = [(key, (None, value)) for key, value in {"model": "ear", **fields}.items()]
    if data is not None:
        parts.append(("file", ("speech.wav", data)))
    with ear.http() as http:
        response: httpx.Response = http.post(PATH, files=parts)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_a_model_of_english_translates_nothing(ear: LiveServer) -> None:
    with ear.http() as http:
        response = http.post(
            "/v1/audio/translations",
            files={"file": ("speech.wav", SOUND), "model": (None, "ear")},
        )
    assert response.status_code == 400 and "hears English alone" in response.text
