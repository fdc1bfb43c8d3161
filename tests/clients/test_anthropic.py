"""Anthropic's own client. Newer ones leave sampling fields to `extra_body`."""

import asyncio

import anthropic
import pytest

from tests.clients.conftest import MODEL, QUESTION

ASK = {
    "model": MODEL,
    "max_tokens": 12,
    "messages": [{"role": "user", "content": QUESTION}],
    "extra_body": {"temperature": 0},
}


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_whole_and_streamed(client, answer):
    whole = client.messages.create(**ASK)
    assert whole.content[0].text == answer
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == answer
        final = stream.get_final_message()
    assert (final.stop_reason, final.content[0].text) == (whole.stop_reason, answer)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_asynchronous_messages(server, answer):
    async def ask():
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
            whole = await client.messages.create(**ASK)
            async with client.messages.stream(**ASK) as stream:
                streamed = await stream.get_final_message()
        return whole.content[0].text, streamed.content[0].text

    assert asyncio.run(ask()) == (answer, answer)


def test_prefill_and_stop_sequences(client):
    prefill = {"role": "assistant", "content": "The capital of France is"}
    ask = ASK | {"messages": [*ASK["messages"], prefill], "stop_sequences": ["."]}
    made = client.messages.create(**ask)
    assert "Paris" in made.content[0].text
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", ".")


def test_tokens_are_counted_and_models_listed(client):
    counted = client.messages.count_tokens(model=MODEL, messages=ASK["messages"])
    usage = client.messages.create(**ASK).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).display_name == MODEL


def test_errors_are_the_clients_own(client):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**ASK | {"model": "other"})
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert unknown.value.request_id == unknown.value.body["request_id"]
    tool = {"name": "", "input_schema": {"type": "object"}}
    with pytest.raises(anthropic.BadRequestError, match="expected a name of 1 to"):
        client.messages.create(**ASK, tools=[tool])


CAPITAL = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_a_tool_is_used_whole_and_streamed_and_its_result_goes_back(client):
    choice = {"type": "tool", "name": "answer", "disable_parallel_tool_use": True}
    ask = ASK | {"max_tokens": 200, "tools": [{"name": "answer", "input_schema": CAPITAL}]}
    made = client.messages.create(**ask, tool_choice=choice)
    (use,) = made.content
    assert (made.stop_reason, use.type, list(use.input)) == ("tool_use", "tool_use", ["city"])
    with client.messages.stream(**ask, tool_choice=choice) as stream:
        assert stream.get_final_message().content[0].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "yes"}
    talk = [
        *ASK["messages"],
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**ASK | {"messages": talk}).usage.output_tokens


def test_models_answer_to_anthropics_names(client, answer):
    made = client.messages.create(**ASK | {"model": "claude-sonnet-4-5"})
    assert made.content[0].text == answer
    assert client.models.retrieve("claude-sonnet-4-5").id == "claude-sonnet-4-5"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_that_is_too_long_is_refused_in_anthropics_words(client, stream):
    long = ASK | {"messages": [{"role": "user", "content": "word " * 6000}]}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**long, stream=stream)
    error = refused.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ")
    assert error["message"].endswith(" tokens > 2047 maximum")
