"""OpenAI's own client, in the version that the other clients bring."""

import asyncio

import openai
import pytest

from tests.clients.conftest import MODEL, QUESTION

GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12}
TALK = [{"role": "user", "content": QUESTION}]


def test_chat_whole_and_streamed(base_url, answer):
    client = openai.OpenAI(base_url=base_url, api_key="none")
    whole = client.chat.completions.create(messages=TALK, **GREEDY)
    assert whole.choices[0].message.content == answer and "Paris" in answer
    assert whole.system_fingerprint.startswith("fp_")
    with client.chat.completions.stream(messages=TALK, **GREEDY) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == answer


def test_fields_that_clients_send_besides(base_url, answer):
    client = openai.OpenAI(base_url=base_url, api_key="none")
    whole = client.chat.completions.create(
        messages=TALK,
        metadata={"run": "1"},
        store=False,
        service_tier="auto",
        safety_identifier="u",
        prompt_cache_key="k",
        verbosity="medium",
        reasoning_effort="medium",
        modalities=["text"],
        **GREEDY,
    )
    assert whole.choices[0].message.content == answer


def test_async_streams_side_by_side(base_url, answer):
    async def ask(client):
        stream = await client.chat.completions.create(messages=TALK, stream=True, **GREEDY)
        return "".join([part.choices[0].delta.content or "" async for part in stream])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            return await asyncio.gather(*(ask(client) for _ in range(4)))

    assert asyncio.run(ask_all()) == [answer] * 4


def test_an_error_is_the_client_s_own(base_url):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            messages=TALK, model=MODEL, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert caught.value.param == "tools"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(messages=TALK, model="other")
