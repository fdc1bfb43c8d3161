"""/v1/completions continues embeddings, in the files that vLLM's clients send."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

IDS = [5, 17, 9, 40, 22, 8]


@pytest.fixture(scope="module")
def accepting():
    server = LiveServer(
        str(tiny_model_with_text()), "--served-model-name=tiny", "--enable-prompt-embeds"
    )
    yield server
    assert server.stop() == 0


def encoded(rows: torch.Tensor, *, numpy: bool = False) -> str:
    file = io.BytesIO()
    np.save(file, rows.numpy()) if numpy else torch.save(rows, file)
    return base64.b64encode(file.getvalue()).decode()


def rows_of(ids: list[int]) -> torch.Tensor:
    table = load_file(tiny_model_with_text() / "model.safetensors")["model.embed_tokens.weight"]
    return table[ids].float()


def test_embeddings_are_completed_as_their_tokens_before_other_prompts(accepting):
    fields = {"max_tokens": 6, "temperature": 0, "return_token_ids": True}
    embeds = [encoded(rows_of(IDS)), encoded(rows_of(IDS[:3]), numpy=True)]
    with accepting.http() as http:
        plain = [
            http.post("/v1/completions", json=fields | {"prompt": ids}).json()["choices"][0]
            for ids in (IDS, IDS[:3], [7, 8])
        ]
        answer = http.post(
            "/v1/completions", json=fields | {"prompt_embeds": embeds, "prompt": [7, 8]}
        )
        assert answer.status_code == 200, answer.text
        for got, wanted in zip(answer.json()["choices"], plain, strict=True):
            assert (got["text"], got["token_ids"]) == (wanted["text"], wanted["token_ids"])
        assert answer.json()["usage"]["prompt_tokens"] == 11
        streamed = http.post(
            "/v1/completions",
            json=fields | {"prompt_embeds": embeds[0], "prompt": "", "stream": True},
        )
        assert streamed.status_code == 200 and "[DONE]" in streamed.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt_embeds": []}, "prompt"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt_embeds": 7}, "prompt_embeds"),
        ({"prompt_embeds": encoded(torch.zeros(2, 3))}, "prompt_embeds"),
        ({"prompt_embeds": encoded(torch.zeros(2, 3)), "echo": True}, "prompt_embeds"),
        ({"prompt_embeds": encoded(torch.zeros(2, 3)), "prompt_logprobs": 1}, "prompt_embeds"),
    ],
    ids=["nothing", "no item", "no file", "a number", "width", "echo", "prompt_logprobs"],
)
def test_wrong_embeddings_are_a_400(accepting, fields, param):
    with accepting.http() as http:
        answer = http.post("/v1/completions", json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_they_are_refused_unless_the_server_accepts_them(http):
    answer = http.post("/v1/completions", json={"prompt_embeds": encoded(rows_of(IDS))})
    assert answer.status_code == 400
    assert "--enable-prompt-embeds" in answer.json()["error"]["message"]
