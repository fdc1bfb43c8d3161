"""The chat models of n8n 2.41. Its OpenAI and Ollama nodes build LangChain.js models, which ask
here with the options that the nodes set; n8n itself is not run.
"""

import pytest

from tests.clients.conftest import MODEL, QUESTION
from tests.clients.test_vercel import run


@pytest.fixture(scope="module")
def found(base_url):
    return run("n8n.mjs", base_url, MODEL, QUESTION)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_the_openai_node_generates_streams_and_calls(found, api, answer):
    assert found[api]["whole"] == found[api]["streamed"] == answer
    assert found[api]["call"]["name"] == "get_weather" and found[api]["call"]["args"]["city"]
    assert 0 < found[api]["usage"] <= 12


def test_the_ollama_node_generates(found, answer):
    assert found["ollama"] == answer


def test_the_nodes_list_the_models(found):
    assert MODEL in found["models"]
