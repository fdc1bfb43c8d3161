"""Audio in chats over HTTP."""

from __future__ import annotations

import pytest

from tests.api.test_audio_input import encoded, part
from tests.support.live_server import LiveServer
from tests.support.tiny_audio import hearing_model, sound


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    (folder / "a.wav").write_bytes(encoded(sound(0)))
    server = LiveServer(
        str(hearing_model("qwen2_audio").path),
        *("--served-model-name=tiny", f"--media-dir={folder}", "--max-audio-bytes=30000"),
        f"--state-dir={tmp_path_factory.mktemp('state')}",
    )
    with server.http() as client:
        yield client
    assert server.stop() == 0


def chat(http, part):
    content = [part, {"type": "text", "text": "What is said?"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 6}
    return http.post("/v1/chat/completions", json=body | {"temperature": 0})


def test_an_answer_depends_on_the_audio_and_not_on_how_it_is_sent(http):
    sent = part(encoded(sound(0)))
    data = sent["input_audio"]["data"]
    forms = [
        sent,
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        {"type": "audio_url", "audio_url": {"url": "file:///a.wav"}},
    ]
    responses = [chat(http, form) for form in forms]
    assert all(response.status_code == 200 for response in responses), responses[0].text
    texts = [response.json()["choices"][0]["message"]["content"] for response in responses]
    other = chat(http, part(encoded(sound(1)))).json()["choices"][0]["message"]["content"]
    assert texts[0] == texts[1] == texts[2] != other
    card = http.get("/v1/models").json()["data"][0]
    assert "audio" in str(card)


@pytest.mark.parametrize(
    ("sent", "said", "param"),
    [
        (part(b"x", "aac"), "got 'aac', expected wav, mp3, flac, ogg", "input_audio.format"),
        (part(b"RIFF"), "audio: it cannot be read", "audio"),
        (part(b"x" * 40_000), "expected at most 30,000", "audio"),
        ({"type": "audio_url", "audio_url": {"url": "https://a.b/c.wav"}}, "is disabled", "audio"),
        ({"type": "audio_url", "audio_url": {"url": "file:///b.wav"}}, "no file", "audio"),
        ({"type": "input_audio", "input_audio": "x"}, "an object with data and format", "audio"),
    ],
)
def test_what_cannot_be_read_is_refused(http, sent, said, param):
    response = chat(http, sent)
    error = response.json()["error"]
    assert response.status_code == 400
    assert said in error["message"] and param in error["param"]


def respond(http, *content, **fields):
    body = {"model": "tiny", "input": [{"role": "user", "content": list(content)}]}
    return http.post(
        "/v1/responses", json=body | {"max_output_tokens": 16, "temperature": 0, **fields}
    )


def test_responses_hear_what_chats_hear(http):
    sent, asked = part(encoded(sound(0))), {"type": "input_text", "text": "What is said?"}
    heard = chat(http, sent).json()["choices"][0]["message"]["content"]
    first = respond(http, sent, asked).json()
    assert first["output"][0]["content"][0]["text"].startswith(heard)
    items = http.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert sent in items[0]["content"]
    earlier = {"previous_response_id": first["id"]}
    again = respond(http, {"type": "input_text", "text": "Again?"}, **earlier)
    assert again.status_code == 200, again.text
    counts = [one["usage"]["input_tokens"] for one in (first, again.json())]
    assert counts[1] > counts[0] + 16, "the conversation contains the audio"
    refused = respond(http, {"type": "input_audio", "input_audio": {"data": "AA"}}, asked)
    assert refused.status_code == 400 and "audio: " in refused.json()["error"]["message"]
    refused = respond(http, {"type": "input_audio"}, asked)
    assert "expected an object with data and format" in refused.json()["error"]["message"]
