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
