"""/v1/embeddings and Ollama's routes give LLM.embed's rows, to the clients that people use."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest

from octavo import LLM
from octavo.utils.progress import quiet
from tests.support.live_server import LiveServer, until

pytestmark = pytest.mark.model

TEXTS = ["A sentence.", "Ship the boxes on Monday, please.", "x"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    state = tmp_path_factory.mktemp("state")
    server = LiveServer("minilm", "--max-model-len=64", f"--state-dir={state}")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    with LLM("minilm", report=quiet, max_model_len=64, threads=1) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs], np.float32)


@pytest.fixture
def http(encoder: LiveServer) -> Iterator[httpx.Client]:
    with encoder.http() as client:
        yield client


def refusal(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error if isinstance(error, str) else error["message"]


def test_openais_client_gets_the_rows_of_embed(encoder: LiveServer, rows: np.ndarray) -> None:
    with encoder.openai() as client:
        made = client.embeddings.create(model="minilm", input=TEXTS)
        one = client.embeddings.create(model="minilm", input=TEXTS[1], encoding_format="float")
    found = np.array([entry.embedding for entry in made.data], np.float32)
    np.testing.assert_array_equal(found, rows)
    np.testing.assert_array_equal(np.array(one.data[0].embedding, np.float32), rows[1])
    assert [entry.index for entry in made.data] == [0, 1, 2]
    assert (made.object, made.model, made.data[0].object) == ("list", "minilm", "embedding")
    assert made.usage.prompt_tokens == made.usage.total_tokens == 5 + 10 + 3


def test_base64_holds_the_same_numbers(http: httpx.Client, rows: np.ndarray) -> None:
    body = {"input": TEXTS, "encoding_format": "base64"}
    data = http.post("/v1/embeddings", json=body).json()["data"]
    found = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data]
    np.testing.assert_array_equal(found, rows)


def test_token_ids_stand_for_their_text(http: httpx.Client, rows: np.ndarray) -> None:
    ids = http.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    for given in (ids, [ids]):
        data = http.post("/v1/embeddings", json={"input": given}).json()["data"]
        np.testing.assert_array_equal(np.array(data[0]["embedding"], np.float32), rows[0])


def test_a_long_text_is_refused_or_cut_as_asked(http: httpx.Client) -> None:
    body: dict[str, Any] = {"input": "word " * 200}
    assert "maximum context length is 64" in refusal(http.post("/v1/embeddings", json=body))
    cut = http.post("/v1/embeddings", json=body | {"truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 64
    short = http.post("/v1/embeddings", json={"input": "word " * 62}).json()
    assert cut["data"][0]["embedding"] == short["data"][0]["embedding"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimensions": 100}, "dimensions: got 100, expected 384"),
        ({"dimensions": -1}, "dimensions: got -1"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"input": []}, "input"),
        ({"input": ["", [1]]}, "input"),
        ({"input": ""}, "input: got an empty text, expected some text"),
        ({"input": ["a", ""]}, "input[1]: got an empty text, expected some text"),
        ({"input": [[]]}, "input: got no token"),
        ({"input": [[1], []]}, "input: got no token"),
        ({"input": [1, 10**6]}, "input: got the token id 1000000"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens: got 65, expected 1 to 64"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: got 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], message: str
) -> None:
    body = {"input": "Hello"} | fields
    assert refusal(http.post("/v1/embeddings", json=body)).startswith(message)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/api/generate", {"model": "minilm", "prompt": "Hello"}),
    ],
)
def test_an_encoder_generates_nothing_and_says_so(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert "minilm can make embeddings and does not generate text" in refusal(
        http.post(path, json=body)
    )


def test_a_decoder_embeds_nothing_and_says_so(server: LiveServer) -> None:
    with server.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input="Hello")
    assert "tiny generates text and does not make embeddings" in caught.value.message


def test_models_and_capabilities_say_what_it_does(http: httpx.Client) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert (card["id"], card["capabilities"], card["max_model_len"]) == (
        "minilm",
        ["embeddings"],
        64,
    )
    fields = http.get("/v1/capabilities").json()["fields"]
    assert {"input", "dimensions", "encoding_format"} <= {entry["name"] for entry in fields}
    paths = {path for entry in fields for path in entry["paths"]}
    assert paths == {"/v1/embeddings", "/score", "/pooling", "/rerank", "/v2/rerank"}


def test_ollamas_client_gets_rows_of_length_one(encoder: LiveServer, rows: np.ndarray) -> None:
    client = ollama.Client(host=encoder.url)
    made = client.embed(model="minilm:latest", input=TEXTS)
    np.testing.assert_allclose(np.array(made.embeddings), rows, atol=1e-6)
    assert made.prompt_eval_count == 5 + 10 + 3
    one = client.embeddings(model="minilm", prompt=TEXTS[0])
    np.testing.assert_allclose(np.array(one.embedding), rows[0], atol=1e-6)
    assert "embedding" in (client.show("minilm").capabilities or [])


def test_ollamas_truncate_false_refuses_a_long_text(http: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "minilm", "input": "word " * 200}
    assert http.post("/api/embed", json=body).json()["prompt_eval_count"] == 64
    message = refusal(http.post("/api/embed", json=body | {"truncate": False}))
    assert "exceeds the context length" in message


def test_the_lines_of_a_batch_may_be_embedded(encoder: LiveServer, rows: np.ndarray) -> None:
    lines = [
        {"custom_id": text, "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for text in TEXTS
    ]
    with encoder.openai() as client:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        assert until(lambda: client.batches.retrieve(made.id).status == "completed")
        output = client.batches.retrieve(made.id).output_file_id
        assert output is not None
        answers = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    found = [one["response"]["body"]["data"][0]["embedding"] for one in answers]
    np.testing.assert_array_equal(np.array(found, np.float32), rows)
