"""/v1/audio/transcriptions gives LLM.transcribe's texts in OpenAI's forms, and says what is wrong
with a sound.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from octavo import LLM, VoiceActivity
from octavo.api.transcription import Transcription
from octavo.utils.progress import quiet
from tests.support.live_server import LiveServer, until
from tests.support.tiny_whisper import noise, tiny_whisper

PATH = "/v1/audio/transcriptions"
_, SOUND = noise(1, 3.0)


@pytest.fixture(scope="module")
def ear() -> Iterator[LiveServer]:
    server = LiveServer(str(tiny_whisper()), "--max-model-len=64", "--served-model-name=ear")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def wanted() -> tuple[Transcription, Transcription]:
    """Returns the text of whole windows, and that with the segments' times."""
    with LLM(str(tiny_whisper()), report=quiet, threads=1) as llm:
        (whole,) = llm.transcribe(SOUND, use_tqdm=False)
        (timed,) = llm.transcribe(SOUND, timestamps=True, use_tqdm=False)
        return whole, timed


@pytest.fixture(scope="module")
def parts() -> Transcription:
    """Returns the text of a sound without pauses, cut at its quietest places."""
    with LLM(str(tiny_whisper()), report=quiet, threads=1) as llm:
        return llm.transcribe(SOUND, chunking=VoiceActivity(), use_tqdm=False)[0]


def test_openais_client_gets_the_text_of_transcribe(
    ear: LiveServer, wanted: tuple[Transcription, Transcription], parts: Transcription
) -> None:
    whole, timed = wanted
    with ear.openai() as client:

        def made(**more: Any) -> Any:
            file = ("speech.wav", SOUND)
            return client.audio.transcriptions.create(model="ear", file=file, **more)

        assert made().text == whole.text
        assert made(response_format="text").strip() == whole.text.strip()
        assert made(response_format="srt") == timed.srt()
        assert made(response_format="vtt") == timed.vtt()
        strategy = {"type": "server_vad", "silence_duration_ms": 500}
        for chunking in ("auto", strategy):
            assert made(chunking_strategy=chunking).text == parts.text
        for more in ({}, {"timestamp_granularities": ["segment"]}):
            verbose = made(response_format="verbose_json", language="en", **more)
            assert (verbose.text, float(verbose.duration)) == (timed.text, 3.0)
            assert [(one.tokens, one.start, one.end, one.seek) for one in verbose.segments] == [
                (one.token_ids, one.start_s, one.end_s, round(100 * one.seek_s))
                for one in timed.segments
            ]


def test_words_have_times(ear: LiveServer) -> None:
    with LLM(str(tiny_whisper()), report=quiet, threads=1) as llm:
        (text,) = llm.transcribe(SOUND, timestamps=None, words=True, use_tqdm=False)
    assert text.words
    with ear.openai() as client:
        for granularities in (["word"], ["word", "segment"]):
            verbose = client.audio.transcriptions.create(
                model="ear",
                file=("speech.wav", SOUND),
                response_format="verbose_json",
                timestamp_granularities=granularities,
            )
            found = [(word.word, word.start, word.end) for word in verbose.words]
            assert found == [(word.word, word.start_s, word.end_s) for word in text.words]
            assert (verbose.segments is None) == (granularities == ["word"])


BAD: dict[str, tuple[bytes | None, dict[str, str], str]] = {
    "empty": (b"", {}, "got an empty file"),
    "truncated": (SOUND[:-1000], {}, "it is truncated"),
    "no sound": (b"hello" * 100, {}, "it cannot be read: Format not recognised"),
    "no file": (None, {}, "expected a WAV, FLAC, OGG or MP3 file"),
    "format": (SOUND, {"response_format": "xml"}, "response_format: got 'xml'"),
    "temperature": (SOUND, {"temperature": "hot"}, "temperature: got 'hot'"),
    "language": (SOUND, {"language": "xx"}, "language: got 'xx', expected en"),
    "prompt": (SOUND, {"prompt": "x"}, "prompt: the model does not support a prompt"),
    "chunking": (
        SOUND,
        {"chunking_strategy": '{"type": "server_vad", "speed": 2}'},
        "expected auto, or an object with the type server_vad",
    ),
    "threshold": (
        SOUND,
        {"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "1.5"},
        "chunking_strategy: threshold: got 1.5, expected a number from 0 to 1",
    ),
    "granularity": (SOUND, {"timestamp_granularities[]": "day"}, "expected segment or word"),
    "words": (
        SOUND,
        {"timestamp_granularities[]": "word"},
        "expected verbose_json, which has words",
    ),
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


def test_an_unknown_field_of_a_form_is_ignored_and_named(ear: LiveServer) -> None:
    fields = {"file": ("speech.wav", SOUND), "model": (None, "ear"), "include[]": (None, "x")}
    with ear.http() as http:
        response = http.post(PATH, files=fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-octavo-ignored"] == '["include[]"]'


def test_a_model_of_english_translates_nothing(ear: LiveServer) -> None:
    with ear.http() as http:
        response = http.post(
            "/v1/audio/translations",
            files={"file": ("speech.wav", SOUND), "model": (None, "ear")},
        )
    assert response.status_code == 400 and "supports English only" in response.text


KEYS = {"one": {"max_running": 1}, "few": {"tokens_per_minute": 10}}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Yields a server with a key that may run one request, and one that has few tokens."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = [{"name": name, "key": name, **limits} for name, limits in KEYS.items()]
    file.write_text(json.dumps({"keys": keys}))
    options = ("--max-model-len=64", "--served-model-name=ear", f"--api-key-file={file}")
    server = LiveServer(str(tiny_whisper()), *options)
    yield server
    assert server.stop() == 0


def post(server: LiveServer, key: str, *, timeout: float = 30) -> httpx.Response:
    files: list[Any] = [("model", (None, "ear")), ("file", ("speech.wav", SOUND))]
    headers = {"Authorization": f"Bearer {key}"}
    with server.http() as http:
        return http.post(PATH, files=files, headers=headers, timeout=timeout)


@contextmanager
def stopped(server: LiveServer) -> Iterator[None]:
    """Stops the engine's process; it goes on at the end."""
    os.kill(server.core_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.core_pid, signal.SIGCONT)


def load_of(server: LiveServer) -> int:
    with server.http() as http:
        headers = {"Authorization": "Bearer one"}
        return int(http.get("/load", headers=headers).json()["server_load"])


def test_a_sounds_windows_are_one_running_request_of_their_key(guarded: LiveServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        with stopped(guarded):
            first = pool.submit(post, guarded, "one")
            assert until(lambda: load_of(guarded) > 0, 5)
            second = post(guarded, "one")
            assert second.status_code == 429 and "are running, expected at most 1" in second.text
        assert first.result().status_code == 200
    assert post(guarded, "one").status_code == 200


def test_a_client_that_leaves_ends_the_work_on_its_sound(guarded: LiveServer) -> None:
    with stopped(guarded):
        with pytest.raises(httpx.ReadTimeout):
            post(guarded, "one", timeout=0.5)
        assert until(lambda: load_of(guarded) == 0, 5)
    assert post(guarded, "one").status_code == 200


def test_tokens_of_a_text_are_charged_to_its_key(guarded: LiveServer) -> None:
    assert post(guarded, "few").status_code == 200
    refused = post(guarded, "few")
    assert refused.status_code == 429 and "retry-after" in refused.headers
