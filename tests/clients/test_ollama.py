"""Ollama's own client."""

import asyncio
import json

import ollama
import pytest

from tests.clients.conftest import MODEL, QUESTION

ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "options": {"temperature": 0, "num_predict": 12},
}


@pytest.fixture
def client(server):
    return ollama.Client(host=server.url)


def test_a_chat_whole_and_streamed(client, answer):
    whole = client.chat(**ASK)
    assert whole.message.content == answer and whole.done
    assert whole.eval_count > 0 and whole.eval_duration > 0 and whole.total_duration > 0
    parts = list(client.chat(**ASK | {"model": f"{MODEL}:latest"}, stream=True))
    assert "".join(part.message.content for part in parts) == answer
    assert parts[-1].done and parts[-1].eval_count == whole.eval_count


def test_an_asynchronous_chat(server, answer):
    async def ask():
        client = ollama.AsyncClient(host=server.url)
        whole = await client.chat(**ASK)
        parts = [part async for part in await client.chat(**ASK, stream=True)]
        return whole.message.content, "".join(part.message.content for part in parts)

    assert asyncio.run(ask()) == (answer, answer)


def test_generate_answers_a_prompt(client, answer):
    ask = {"model": MODEL, "options": ASK["options"]}
    assert client.generate(prompt=QUESTION, **ask).response == answer
    parts = client.generate(prompt=QUESTION, stream=True, keep_alive="5m", **ask)
    assert "".join(part.response for part in parts) == answer
    assert "Paris" in client.generate(prompt="The capital of France is", raw=True, **ask).response


def test_models_are_listed_shown_and_running(client):
    assert [model.model for model in client.list().models] == [f"{MODEL}:latest"]
    assert client.ps().models[0].context_length == 2048
    assert client.show(MODEL).capabilities == ["completion", "tools"]


def test_a_model_is_pulled_copied_and_its_copy_deleted(client):
    assert client.pull(MODEL).status == "success"
    assert [told.status for told in client.pull(f"{MODEL}:latest", stream=True)][-1] == "success"
    assert client.copy(MODEL, "copied").status == "success"
    assert {model.model for model in client.list().models} == {f"{MODEL}:latest", "copied:latest"}
    assert client.chat(**ASK | {"model": "copied"}).message.content
    assert client.ps().models[0].expires_at
    assert client.delete("copied").status == "success"
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.delete("copied")
    with pytest.raises(ollama.ResponseError, match="expected") as unknown:
        client.pull("no such model")
    assert unknown.value.status_code == 400


def test_errors_are_the_clients_own(client):
    with pytest.raises(ollama.ResponseError, match="does not exist") as unknown:
        client.chat(**ASK | {"model": "other"})
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat(**ASK, think=True)
    with pytest.raises(ollama.ResponseError, match="publishing models is not supported") as pushed:
        client.push(MODEL)
    assert pushed.value.status_code == 501


def test_a_form_and_tools(client):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    }
    ask = ASK | {"options": {"temperature": 0, "num_predict": 200}}
    assert "city" in json.loads(client.chat(**ask, format=schema).message.content)

    def look_up(city: str) -> str:
        """Returns the weather of a city."""
        return city

    made = client.chat(**ask, tools=[look_up])
    assert made.message.content or made.message.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_that_is_too_long_is_refused_in_ollamas_words(client, stream):
    long = ASK | {"messages": [{"role": "user", "content": "word " * 6000}]}
    with pytest.raises(ollama.ResponseError, match="exceeds the available context size") as refused:
        list(client.chat(**long, stream=stream))
    assert refused.value.status_code == 400
