"""litellm: completion, acompletion and streams through its OpenAI provider."""

import asyncio
import json

import litellm
import pytest

from tests.clients.conftest import MODEL, QUESTION

TALK = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def options(base_url):
    return {
        "model": f"openai/{MODEL}",
        "api_base": base_url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 12,
    }


def test_completion_whole_and_streamed(options, answer):
    found = litellm.completion(messages=TALK, **options)
    assert found.choices[0].message.content == answer
    parts = litellm.completion(messages=TALK, stream=True, **options)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == answer


def test_async_completion(options, answer):
    found = asyncio.run(litellm.acompletion(messages=TALK, **options))
    assert found.choices[0].message.content == answer and found.usage.completion_tokens <= 12


def test_text_completion(options):
    found = litellm.text_completion(
        prompt="The capital of France is", **options | {"model": f"text-completion-openai/{MODEL}"}
    )
    assert "Paris" in found.choices[0].text


def test_an_error_has_litellm_s_type(options):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=TALK, **options | {"temperature": 5})


def test_a_tool_is_called(options):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    }
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    asked = options | {"max_tokens": 200, "tools": [tool], "tool_choice": "required"}
    call = litellm.completion(messages=TALK, **asked).choices[0].message.tool_calls[0]
    assert call.function.name == "look_up" and "city" in json.loads(call.function.arguments)


PROVIDERS = {
    "openai": "/v1",
    "openai/responses": "/v1",
    "hosted_vllm": "/v1",
    "lm_studio": "/v1",
    "litellm_proxy": "/v1",
    "anthropic": "",
    "ollama": "",
    "ollama_chat": "",
    "cohere_chat": "/v2/chat",
}


@pytest.fixture(params=PROVIDERS)
def provider(request, server):
    """The options of each of its providers that speaks an API of this server."""
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": server.url + PROVIDERS[request.param],
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 12,
        "max_retries": 0,
    }


def test_each_provider_answers_whole_and_streamed(provider, answer, ask):
    if provider["model"].startswith("ollama/"):  # LiteLLM writes the conversation as one text
        answer = ask(f"### User:\n{QUESTION}\n\n")
    found = litellm.completion(messages=TALK, **provider)
    assert found.choices[0].message.content == answer
    parts = litellm.completion(messages=TALK, stream=True, **provider)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_has_litellm_s_type(provider, stream):
    """LiteLLM has no such mapping for Ollama, whose server cuts long conversations."""
    is_mapped = "ollama" not in provider["model"]
    kind = litellm.ContextWindowExceededError if is_mapped else litellm.BadRequestError
    with pytest.raises(kind):
        list(
            litellm.completion(
                messages=[{"role": "user", "content": "word " * 6000}], stream=stream, **provider
            )
        )


def test_a_text_that_is_too_long_has_litellm_s_type(options):
    asked = options | {"model": f"text-completion-openai/{MODEL}", "max_retries": 0}
    for stream in (False, True):
        with pytest.raises(litellm.ContextWindowExceededError):
            list(litellm.text_completion(prompt="word " * 6000, stream=stream, **asked))


def test_a_tool_is_called_through_cohere(server):
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    parts = litellm.completion(
        model=f"cohere_chat/{MODEL}",
        api_base=f"{server.url}/v2/chat",
        api_key="none",
        messages=TALK,
        tools=[tool],
        extra_body={"tool_choice": "REQUIRED"},  # it sends no tool_choice of its own there
        max_tokens=100,
        stream=True,
    )
    calls = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "look_up"
    first = [call.function.arguments or "" for call in calls if call.index == 0]
    json.loads("".join(first))
