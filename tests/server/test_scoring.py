"""/classify, /score and /rerank give over HTTP what LLM.classify and LLM.score give, in the forms
of vLLM, Jina and Cohere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from octavo import LLM, TextPair
from octavo.utils.progress import quiet
from tests.support.live_server import LiveServer
from tests.support.tiny_encoders import save_classifier, save_encoder, save_word_tokenizer

QUERY = "where do whales sleep?"
TEXTS = ["near the surface.", "the box left on monday. " * 4, "q", "half awake, whales rest."]
LONG = "word " * 200
RERANK_PATHS = ["/rerank", "/v1/rerank", "/v2/rerank", "/cohere/v2/rerank"]
LABELS = {"0": "yes", "1": "no", "2": "maybe"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    embedder = save_encoder(folder / "embedder", "bert")
    save_word_tokenizer(embedder)
    return {
        "ranker": save_classifier(folder / "ranker", num_labels=1),
        "three": save_classifier(folder / "three", id2label=LABELS),
        "embedder": embedder,
    }


@pytest.fixture(scope="module")
def scorer(paths: dict[str, Path]) -> Iterator[LiveServer]:
    models = [f"{name}={path}" for name, path in paths.items()]
    server = LiveServer(*models, "--max-model-len=400")
    yield server
    assert server.stop() == 0
    assert not any("Traceback" in line for line in server.lines)


@pytest.fixture
def http(scorer: LiveServer) -> Iterator[httpx.Client]:
    with scorer.http() as client:
        yield client


@pytest.fixture(scope="module")
def expected(paths: dict[str, Path]) -> dict[str, list[float]]:
    """Scores of the texts with the query, by model."""
    found = {}
    for name in ("ranker", "embedder"):
        with LLM(str(paths[name]), report=quiet, threads=1) as llm:
            outputs = llm.score(QUERY, TEXTS, use_tqdm=False)
        found[name] = [output.outputs.score for output in outputs]
    return found


def answer(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def refusal(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    body = response.json()
    return body.get("message") or body["error"]["message"]


def test_classify_gives_the_probabilities_and_names(
    http: httpx.Client, paths: dict[str, Path]
) -> None:
    with LLM(str(paths["three"]), report=quiet, threads=1) as llm:
        texts = llm.classify(TEXTS, use_tqdm=False)
        pairs = llm.classify([TextPair(QUERY, text) for text in TEXTS], use_tqdm=False)
    for given, wanted in ((TEXTS, texts), ([[QUERY, text] for text in TEXTS], pairs)):
        found = answer(http.post("/classify", json={"model": "three", "input": given}))
        assert (found["object"], found["model"]) == ("list", "three")
        for index, (entry, output) in enumerate(zip(found["data"], wanted, strict=True)):
            assert entry == {
                "index": index,
                "label": output.outputs.label,
                "probs": output.outputs.probs,
                "num_classes": 3,
            }
        num_tokens = sum(len(output.prompt_token_ids) for output in wanted)
        assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_scores_before_the_activation_are_given_as_asked(http: httpx.Client) -> None:
    body = {"model": "three", "input": TEXTS[0]}
    (raw,) = answer(http.post("/classify", json=body | {"use_activation": False}))["data"]
    (made,) = answer(http.post("/classify", json=body | {"use_activation": True}))["data"]
    shares = np.exp(np.array(raw["probs"]))
    np.testing.assert_allclose(made["probs"], shares / shares.sum(), atol=1e-6)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("model", ["ranker", "embedder"])
def test_score_takes_one_or_as_many(
    http: httpx.Client, expected: dict[str, list[float]], model: str, path: str
) -> None:
    for body in (
        {"text_1": QUERY, "text_2": TEXTS},
        {"queries": [QUERY] * len(TEXTS), "documents": TEXTS},
        {"data_1": [QUERY], "data_2": TEXTS},
    ):
        found = answer(http.post(path, json=body | {"model": model}))
        assert [entry["score"] for entry in found["data"]] == expected[model]
        assert [entry["index"] for entry in found["data"]] == list(range(len(TEXTS)))
        assert (found["object"], found["data"][0]["object"]) == ("list", "score")


@pytest.mark.parametrize("path", RERANK_PATHS)
@pytest.mark.parametrize("model", ["ranker", "embedder"])
def test_rerank_puts_the_best_first(
    http: httpx.Client, expected: dict[str, list[float]], model: str, path: str
) -> None:
    body = {"model": model, "query": QUERY, "documents": [*TEXTS[:2], {"text": TEXTS[2]}, TEXTS[3]]}
    order = sorted(range(len(TEXTS)), key=lambda index: -expected[model][index])
    results = answer(http.post(path, json=body | {"return_documents": True}))["results"]
    assert results == [
        {
            "index": index,
            "relevance_score": expected[model][index],
            "document": {"text": TEXTS[index]},
        }
        for index in order
    ]
    best = answer(http.post(path, json=body | {"top_n": 2, "return_documents": False}))["results"]
    assert best == [
        {"index": index, "relevance_score": expected[model][index]} for index in order[:2]
    ]
    for many in (0, 100):
        assert len(answer(http.post(path, json=body | {"top_n": many}))["results"]) == len(TEXTS)


def test_forms_are_those_of_their_apis(http: httpx.Client) -> None:
    body = {"model": "ranker", "query": "a", "documents": ["b", "c"]}
    plain = answer(http.post("/rerank", json=body))
    assert plain["id"].startswith("rerank-") and plain["model"] == "ranker"
    assert plain["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    assert "document" in plain["results"][0]
    cohere = answer(http.post("/v2/rerank", json=body))
    assert cohere["meta"]["billed_units"] == {"search_units": 1}
    assert cohere["meta"]["tokens"]["input_tokens"] == 10
    assert set(cohere["results"][0]) == {"index", "relevance_score"}


def test_a_long_document_is_refused_or_cut(http: httpx.Client) -> None:
    body = {"model": "ranker", "query": QUERY, "documents": ["a", LONG]}
    for model in ("ranker", "embedder"):
        asked = body | {"model": model}
        assert "maximum context length is 400" in refusal(http.post("/rerank", json=asked))
        assert answer(http.post("/rerank", json=asked | {"truncate_prompt_tokens": -1}))
        assert answer(http.post("/v2/rerank", json=asked))
    short = {"query": QUERY, "documents": ["a", LONG[:4]]}
    cut = answer(http.post("/rerank", json=body | {"max_tokens_per_doc": 4}))["results"]
    whole = answer(http.post("/rerank", json=body | short))["results"]
    assert [one["relevance_score"] for one in cut] == [one["relevance_score"] for one in whole]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/classify", {"model": "embedder", "input": "a"}, "model: embedder can make embeddings"),
        ("/classify", {"model": "three"}, "input: field required"),
        ("/classify", {"model": "three", "input": []}, "input: got an empty list"),
        ("/classify", {"model": "three", "input": [["a", 5]]}, "input: got"),
        ("/classify", {"model": "three", "input": [["a", "b", "c"]]}, "input: got"),
        ("/classify", {"model": "three", "input": [5, 10**6]}, "input: got the token id 1000000"),
        ("/classify", {"model": "three", "input": LONG}, "This model's maximum context length"),
        ("/score", {"text_1": "a"}, "text_1: got text_1, expected text_1 and text_2, or"),
        ("/score", {}, "text_1: got none of them"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1: got 2 texts, expected"),
        ("/score", {"queries": "a", "documents": []}, "documents: got no text"),
        ("/score", {"text_1": "a", "text_2": [[5]]}, "text_2: got"),
        (
            "/score",
            {"model": "three", "text_1": "a", "text_2": "b"},
            "model: has 3 labels",
        ),
        (
            "/score",
            {"model": "embedder", "text_1": "a", "text_2": "b", "use_activation": False},
            "use_activation: got",
        ),
        ("/rerank", {"query": "a", "documents": []}, "documents: got []"),
        ("/rerank", {"query": "a", "documents": [5]}, "documents: got"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query: got ['a'], expected a string"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n: got -1"),
        (
            "/rerank",
            {"model": "embedder", "query": "a", "documents": ["b"], "max_tokens_per_doc": 3},
            "max_tokens_per_doc: got 3, requires a cross-encoder",
        ),
        ("/v2/rerank", {"query": "a", "documents": []}, "documents: got []"),
        ("/v2/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents: got 2049 prompts"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any], message: str
) -> None:
    assert refusal(http.post(path, json={"model": "ranker"} | fields)).startswith(message)


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        ("/classify", {"model": "three", "input": "a", "softmax": 1}, "softmax"),
        ("/score", {"text_1": "a", "text_2": "b", "x y": 1}, '["x y"]'),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": []}, "rank_fields"),
        ("/rerank", {"query": "a", "documents": [{"text": "b", "id": 1}]}, "documents[].id"),
        ("/v2/rerank", {"query": "a", "documents": [{"text": "b", "id": 1}]}, "documents[].id"),
    ],
)
def test_unknown_fields_are_ignored_and_named(
    http: httpx.Client, path: str, fields: dict[str, Any], ignored: str
) -> None:
    response = http.post(path, json={"model": "ranker"} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-octavo-ignored"] == ignored


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/classify", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_a_model_that_generates_scores_nothing(
    server: LiveServer, path: str, fields: dict[str, Any]
) -> None:
    with server.http() as client:
        message = refusal(client.post(path, json=fields))
    assert message.startswith("model: tiny generates text and does not")


def test_the_server_says_what_to_try(scorer: LiveServer) -> None:
    (line,) = (line for line in scorer.lines if line.startswith("try: "))
    assert f"curl {scorer.url}/classify " in line and '"input": "Light' in line


def test_models_and_capabilities_say_what_they_do(http: httpx.Client) -> None:
    cards = {card["id"]: card["capabilities"] for card in http.get("/v1/models").json()["data"]}
    assert cards == {"ranker": ["classify"], "three": ["classify"], "embedder": ["embeddings"]}
    fields = http.get("/v1/capabilities", params={"model": "ranker"}).json()["fields"]
    taken = {entry["name"]: entry["paths"] for entry in fields}
    assert taken["top_n"] == ["/rerank", "/v2/rerank"] and taken["text_1"] == ["/score"]
