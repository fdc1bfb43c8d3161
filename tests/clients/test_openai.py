"""OpenAI's own client, in the version that the other clients bring."""

import asyncio

import openai
import pydantic
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
            messages=TALK, model=MODEL, tools=[{"type": "function", "function": {"name": ""}}]
        )
    assert caught.value.param == "tools[0].function.name"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(messages=TALK, model="other")


class Capital(pydantic.BaseModel):
    """Answer to a question."""

    city: str = pydantic.Field(max_length=20)
    country: str = pydantic.Field(max_length=20)


def test_parsed_answers_and_calls(base_url):
    options = GREEDY | {"max_tokens": 200}
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        parse = client.chat.completions.parse
        found = parse(messages=TALK, response_format=Capital, **options)
        assert isinstance(found.choices[0].message.parsed, Capital)
        tool = openai.pydantic_function_tool(Capital)
        called = parse(messages=TALK, tools=[tool], tool_choice="required", **options)
        call = called.choices[0].message.tool_calls[0].function
        assert isinstance(call.parsed_arguments, Capital)
        assert called.choices[0].finish_reason == "tool_calls"


def test_the_stream_helper_builds_calls(base_url):
    options = GREEDY | {"max_tokens": 200, "parallel_tool_calls": False}
    tool = openai.pydantic_function_tool(Capital)
    with (
        openai.OpenAI(base_url=base_url, api_key="none") as client,
        client.chat.completions.stream(
            messages=TALK, tools=[tool], tool_choice="required", **options
        ) as stream,
    ):
        kinds = {event.type for event in stream}
        found = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    call = found.choices[0].message.tool_calls[0].function
    assert isinstance(call.parsed_arguments, Capital)


def test_responses_parse_and_call(base_url):
    options = {"model": MODEL, "input": QUESTION, "max_output_tokens": 200, "temperature": 0}
    tool = openai.pydantic_function_tool(Capital)["function"]
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        found = client.responses.parse(text_format=Capital, **options)
        assert isinstance(found.output_parsed, Capital)
        with client.responses.stream(
            tools=[{"type": "function", **tool}],
            tool_choice="required",
            parallel_tool_calls=False,
            **options,
        ) as stream:
            kinds = {event.type for event in stream}
            last = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    Capital.model_validate_json(last.output[0].arguments)


LONG = "word " * 6000


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_that_is_too_long_has_openais_code(base_url, stream):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            messages=[{"role": "user", "content": LONG}], stream=stream, **GREEDY
        )
    assert refused.value.code == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in refused.value.message


def test_a_response_that_is_too_long_fails_in_its_stream(base_url):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input=LONG)
    assert refused.value.code == "context_length_exceeded"
    *_, last = client.responses.create(model=MODEL, input=LONG, stream=True)
    assert last.type == "response.failed"
    assert last.response.error.code == "context_length_exceeded"


def test_input_tokens_are_counted_before_a_response(base_url):
    client = openai.OpenAI(base_url=base_url, api_key="none")
    counted = client.responses.input_tokens.count(model=MODEL, input=QUESTION)
    made = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=1)
    assert counted.input_tokens == made.usage.input_tokens


def test_logprobs_of_a_response(base_url):
    client = openai.OpenAI(base_url=base_url, api_key="none")
    made = client.responses.create(
        model=MODEL,
        input=QUESTION,
        temperature=0,
        max_output_tokens=12,
        include=["message.output_text.logprobs"],
        top_logprobs=3,
    )
    found = made.output[0].content[0].logprobs
    assert "".join(one.token for one in found).removesuffix("<|im_end|>") == made.output_text
    assert all(len(one.top_logprobs) == 3 for one in found)
