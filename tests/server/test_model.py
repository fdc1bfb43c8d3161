"""A real model behind the server, asked through OpenAI's client."""

import pytest

from tests.support.live_server import LiveServer

pytestmark = pytest.mark.model

CAPITAL = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def client():
    server = LiveServer("smollm2")
    with server.openai() as client:
        yield client
    assert server.stop() == 0


def test_it_knows_the_capital_of_france(client):
    chunks = client.chat.completions.create(
        model="smollm2", messages=CAPITAL, temperature=0, max_tokens=40, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Paris" in text
    assert (
        client.chat.completions.create(
            model="smollm2", messages=CAPITAL, temperature=0, max_tokens=40
        )
        .choices[0]
        .message.content
        == text
    )


def test_it_remembers_the_conversation(client):
    first = client.chat.completions.create(model="smollm2", messages=CAPITAL, temperature=0)
    assert first.choices[0].finish_reason == "stop"
    turns = [
        *CAPITAL,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = client.chat.completions.create(
        model="smollm2", messages=turns, temperature=0, max_tokens=40
    )
    assert (
        second.usage.prompt_tokens_details.cached_tokens > 0 and second.choices[0].message.content
    )


def test_a_stop_text_inside_tokens_and_unicode(client):
    options = {"model": "smollm2", "temperature": 0, "max_tokens": 40}
    whole = (
        client.completions.create(prompt="The numbers are one, two, three,", **options)
        .choices[0]
        .text
    )
    stop = whole.strip()[3:9]
    assert (
        client.completions.create(prompt="The numbers are one, two, three,", stop=stop, **options)
        .choices[0]
        .text
        == whole.split(stop)[0]
    )
    prompt = "数字：一、二、三、"
    whole = client.completions.create(prompt=prompt, **options).choices[0].text
    streamed = client.completions.create(prompt=prompt, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole
