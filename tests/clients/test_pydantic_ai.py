"""pydantic-ai: an agent with text output, whole, streamed and over several turns."""

import asyncio

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.conftest import MODEL, QUESTION


@pytest.fixture
def agent(base_url):
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base_url, api_key="none"))
    return Agent(model, model_settings={"temperature": 0, "max_tokens": 12})


def test_an_agent_answers(agent, answer):
    found = agent.run_sync(QUESTION)
    assert found.output == answer
    assert agent.run_sync("And of Italy?", message_history=found.all_messages()).output


def test_an_agent_streams(agent, answer):
    async def ask():
        async with agent.run_stream(QUESTION) as run:
            return [text async for text in run.stream_text(delta=True, debounce_by=None)]

    assert "".join(asyncio.run(ask())) == answer


class Capital(BaseModel):
    """The capital of a country."""

    city: str = Field(max_length=20)


@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
def test_an_agent_answers_in_a_form(base_url, form):
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base_url, api_key="none"))
    settings = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False}
    agent = Agent(model, output_type=form(Capital), model_settings=settings)
    assert isinstance(agent.run_sync(QUESTION).output, Capital)
