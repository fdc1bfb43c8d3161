"""Cohere's own client, with version 2 of its API."""

import asyncio
import json

import cohere
import pytest

from tests.clients.conftest import MODEL, QUESTION
from tests.support.live_server import LiveServer

ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 12,
}


@pytest.fixture(params=["", "/cohere"])
def client(server, request):
    return cohere.ClientV2(base_url=server.url + request.param, api_key="none")


def texts(events):
    return [event.delta.message.content.text for event in events if event.type == "content-delta"]


def test_a_chat_whole_and_streamed(client, answer):
    whole = client.chat(**ASK)
    assert whole.message.content[0].text == answer
    events = list(client.chat_stream(**ASK, logprobs=True))
    assert "".join(texts(events)) == answer
    assert events[0].type == "message-start" and events[-1].type == "message-end"
    assert events[-1].delta.finish_reason == whole.finish_reason
    assert events[-1].delta.usage.tokens == whole.usage.tokens
    assert all(event.logprobs.token_ids for event in events if event.type == "content-delta")


def test_an_asynchronous_chat(server, answer):
    async def ask():
        async with cohere.AsyncClientV2(base_url=server.url, api_key="none") as client:
            whole = await client.chat(**ASK)
            events = [event async for event in client.chat_stream(**ASK)]
        return whole.message.content[0].text, "".join(texts(events))

    assert asyncio.run(ask()) == (answer, answer)


def test_errors_are_the_clients_own(client):
    with pytest.raises(cohere.NotFoundError) as unknown:
        client.chat(**ASK | {"model": "other"})
    assert unknown.value.body["message"].startswith("The model `other` does not exist.")
    with pytest.raises(cohere.BadRequestError) as refused:
        client.chat(**ASK, documents=["a"])
    assert refused.value.body == {"message": "documents: not supported by this server"}


def test_a_tool_is_called(server):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    }
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    ask = ASK | {"max_tokens": 200, "tools": [tool], "tool_choice": "REQUIRED"}
    client = cohere.ClientV2(base_url=server.url, api_key="none")
    made = client.chat(**ask)
    call = made.message.tool_calls[0]
    assert call.function.name == "look_up" and "city" in json.loads(call.function.arguments)
    kinds = {event.type for event in client.chat_stream(**ask)}
    assert {"tool-call-start", "tool-call-delta", "tool-call-end"} <= kinds


@pytest.fixture(scope="module")
def encoder():
    server = LiveServer("minilm", "--max-model-len=128")
    yield server
    assert server.stop() == 0


RERANK = {
    "model": "minilm",
    "query": "Where do whales sleep?",
    "documents": ["The box left on Monday.", "Whales rest near the surface.", "word " * 500],
}


@pytest.mark.parametrize("prefix", ["", "/cohere"])
def test_documents_are_put_in_order(encoder, prefix):
    client = cohere.ClientV2(base_url=encoder.url + prefix, api_key="none")
    made = client.rerank(**RERANK, top_n=2)
    assert made.results[0].index == 1 and len(made.results) == 2
    assert made.results[0].relevance_score > 0.5 > made.results[1].relevance_score
    assert made.meta.billed_units.search_units == 1 and made.meta.tokens.input_tokens > 128
    with pytest.raises(cohere.BadRequestError) as refused:
        client.rerank(**RERANK | {"documents": []})
    assert refused.value.body["message"].startswith("documents: got []")


def test_the_older_client_puts_documents_in_order(encoder):
    client = cohere.Client(base_url=encoder.url, api_key="none")
    made = client.rerank(**RERANK | {"documents": RERANK["documents"][:2]}, return_documents=True)
    assert [result.index for result in made.results] == [1, 0]
    assert made.results[0].document.text == RERANK["documents"][1]
