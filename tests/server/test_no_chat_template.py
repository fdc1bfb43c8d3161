"""A model without a chat template completes prompts in Ollama's API; conversations are refused."""

import json
import shutil

import pytest

from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(tiny_model_with_text(), path)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    server = LiveServer(str(path), "--served-model-name=base")
    with server.http() as client:
        yield client
    assert server.stop() == 0


@pytest.mark.parametrize("system", [{}, {"system": "Be kind"}])
def test_a_generation_completes_the_prompt(http, system):
    options = {"num_predict": 6, "temperature": 0}
    body = {"model": "base", "prompt": "Hello", "stream": False, "options": options, **system}
    made = http.post("/api/generate", json=body).json()
    text = "\n\n".join([*system.values(), "Hello"])
    plain = {"model": "base", "prompt": text, "max_tokens": 6, "temperature": 0}
    expected = http.post("/v1/completions", json=plain).json()["choices"][0]["text"]
    assert made["response"] == expected and made["done"]


def test_a_conversation_is_refused_with_a_hint(http):
    body = {"model": "base", "messages": [{"role": "user", "content": "Hello"}]}
    refused = http.post("/api/chat", json=body)
    assert refused.status_code == 400 and "the model has no chat template" in refused.text
