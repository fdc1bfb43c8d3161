"""Images over HTTP, in the forms of all dialects that have one, at a model that reads them."""

from __future__ import annotations

import base64
import io

import pytest

from tests.support.live_server import LiveServer
from tests.support.tiny_images import picture, seeing_model


def encoded(seed: int, width: int = 45, height: int = 37) -> str:
    file = io.BytesIO()
    picture(seed, width, height).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    (folder / "cat.png").write_bytes(base64.b64decode(encoded(0)))
    server = LiveServer(
        str(seeing_model("qwen2_vl").path),
        "--served-model-name=tiny",
        f"--media-dir={folder}",
        "--max-images=2",
        "--max-image-pixels=10000",
    )
    yield server
    assert server.stop() == 0


@pytest.fixture
def http(server):
    with server.http() as client:
        yield client


def part(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def data_url(seed: int) -> str:
    return f"data:image/png;base64,{encoded(seed)}"


def chat(http, *parts: dict[str, object], **fields: object):
    content = [*parts, {"type": "text", "text": "What is it?"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 6}
    return http.post("/v1/chat/completions", json=body | {"temperature": 0} | fields)


def text_of(response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_an_answer_depends_on_the_image_and_not_on_how_it_is_sent(http):
    cat, dog = text_of(chat(http, part(data_url(0)))), text_of(chat(http, part(data_url(1))))
    assert cat != dog
    assert text_of(chat(http, part("file:///cat.png"))) == cat
    usage = chat(http, part(data_url(0))).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 16


def test_other_dialects_send_images_too(http):
    cat = text_of(chat(http, part(data_url(0))))
    source = {"type": "base64", "media_type": "image/png", "data": encoded(0)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 6}
    answer = http.post("/v1/messages", json=body | {"temperature": 0})
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][0]["text"] == cat
    message = {"role": "user", "content": "What is it?", "images": [encoded(0)]}
    options = {"num_predict": 6, "temperature": 0}
    body = {"model": "tiny", "messages": [message], "stream": False, "options": options}
    answer = http.post("/api/chat", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["message"]["content"] == cat
    parts = [{"type": "input_image", "image_url": data_url(0)}]
    parts += [{"type": "input_text", "text": "What is it?"}]
    body = {"model": "tiny", "input": [{"role": "user", "content": parts}], "temperature": 0}
    answer = http.post("/v1/responses", json=body | {"max_output_tokens": 16, "store": False})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["content"][0]["text"].startswith(cat)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png;base64,AAAA", "the bytes are not a supported image"),
        ("data:image/png;base64,%%%", "its base64 cannot be read"),
        (f"data:image/png;base64,{encoded(0)[:200]}", "damaged or ends too early"),
        (f"data:image/png;base64,{encoded(0, 300, 200)}", "expected at most 10,000 in all"),
        ("http://127.0.0.1/cat.png", "fetching URLs is disabled"),
        ("file:///../secret.png", "there is no file"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_image_is_the_clients_fault(http, url, said):
    response = chat(http, part(url))
    assert response.status_code == 400
    error = response.json()["error"]
    assert said in error["message"] and error["param"] == "image" and "hint" in error["message"]


def test_more_images_than_allowed_are_refused(http):
    response = chat(http, *[part(data_url(0))] * 3)
    assert response.status_code == 400 and "expected at most 2 per prompt" in response.text


def test_an_image_part_without_a_url_is_refused_by_its_path(http):
    response = chat(http, {"type": "image_url", "image_url": {"uri": "x"}})
    assert response.status_code == 400 and "messages[0].content[0].image_url" in response.text


def test_models_say_that_they_read_images(http):
    (card,) = http.get("/v1/models").json()["data"]
    assert card["capabilities"] == ["completions", "chat", "images"]
    assert http.get("/v1/capabilities").json()["features"]["images"] is True
    assert "vision" in http.post("/api/show", json={"model": "tiny"}).json()["capabilities"]


def video(*seeds: int, begin: str = "data:video/jpeg;base64,") -> dict[str, object]:
    url = begin + ",".join(map(encoded, seeds))
    return {"type": "video_url", "video_url": {"url": url}}


def test_an_answer_depends_on_the_frames_of_a_video(http):
    first = text_of(chat(http, video(0, 1)))
    assert text_of(chat(http, video(2, 0))) != first
    assert text_of(chat(http, video(0, 1), part(data_url(2)))) != first


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([video(0), video(1)], "video: got 2 videos, expected at most 1 per prompt"),
        ([{"type": "video_url", "video_url": {}}], "messages[0].content[0].video_url"),
        ([video(0, begin="data:video/jpeg;base64,AAAA,")], "the bytes are not a supported image"),
        ([{"type": "video_url", "video_url": {"url": "http://a/b.mp4"}}], "video: got the address"),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_what_is_no_video_is_the_clients_fault(http, parts, said):
    response = chat(http, *parts)
    assert response.status_code == 400 and said in response.json()["error"]["message"]


IMAGE_TEXT = ("internvl", "llava", "llava_next", "llava_onevision", "paligemma")


@pytest.fixture(scope="module")
def families():
    paths = [f"{family}={seeing_model(family).path}" for family in IMAGE_TEXT]
    server = LiveServer(*paths, "--max-model-len=512", "--threads=1")
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize("family", IMAGE_TEXT)
def test_each_family_streams_what_it_sees(families, family):
    """PaliGemma's prompt is an image and a text; it has no chat template of roles."""
    with families.openai() as client:

        def stream(seed: int) -> tuple[str, list[float]]:
            content = [part(data_url(seed)), {"type": "text", "text": "What is it?"}]
            chunks = client.chat.completions.create(
                model=family,
                messages=[{"role": "user", "content": content}],
                max_tokens=8,
                temperature=0,
                stream=True,
                logprobs=True,
            )
            choices = [chunk.choices[0] for chunk in chunks]
            entries = [
                entry for each in choices if each.logprobs for entry in each.logprobs.content
            ]
            text = "".join(each.delta.content or "" for each in choices)
            return text, [entry.logprob for entry in entries]

        cat, dog = stream(0), stream(1)
    assert cat[0] and cat[1] != dog[1]
    assert stream_again(families, family) == cat[0]


def stream_again(families, family: str) -> str:
    """Returns the answer about the same image, not streamed."""
    with families.http() as http:
        return text_of(chat(http, part(data_url(0)), model=family, max_tokens=8))
