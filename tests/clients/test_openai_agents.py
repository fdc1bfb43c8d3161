"""OpenAI's agent SDKs, in JavaScript and Python: they send an answer's parts back as they got
them, with fields that no request has.
"""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.clients.conftest import MODEL, QUESTION
from tests.support.live_server import LiveServer

MORE = "And what is the capital of Italy? Answer in one word."
NODE = Path(__file__).parent / "node"
EXAMPLE = Path(__file__).parents[2] / "examples" / "agents_sdk.py"

set_tracing_disabled(disabled=True)


def test_the_javascript_sdk_has_a_conversation_in_both_apis(base_url, answer):
    command = ["node", "agents.mjs", base_url, MODEL, QUESTION, MORE]
    done = subprocess.run(
        command, cwd=NODE, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for api in ("chat", "responses"):
        assert found[api]["first"] == answer
        assert "Rome" in found[api]["second"] and "Rome" in found[api]["third"]
    assert found["ignored"] == []


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
def model(request, base_url):
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    return request.param(model=MODEL, openai_client=client)


def test_the_python_sdk_has_a_conversation(model, answer):
    settings = ModelSettings(temperature=0, max_tokens=12, store=True)
    agent = Agent(name="Geographer", model=model, model_settings=settings)

    async def talk():
        first = await Runner.run(agent, QUESTION)
        turns = [*first.to_input_list(), {"role": "user", "content": MORE}]
        second = await Runner.run(agent, turns)
        streamed = Runner.run_streamed(agent, turns)
        async for _ in streamed.stream_events():
            pass
        return first.final_output, second.final_output, streamed.final_output

    first, second, third = asyncio.run(talk())
    assert first == answer and "Rome" in second and third == second


def test_the_python_sdk_calls_a_tool(model):
    asked = []

    @function_tool
    def population(city: str) -> str:
        """Returns the number of people in a city."""
        asked.append(city)
        return "2 million"

    settings = ModelSettings(temperature=0, max_tokens=60, tool_choice="required")
    agent = Agent(name="Counter", model=model, model_settings=settings, tools=[population])
    result = asyncio.run(Runner.run(agent, "How many people live in Paris?"))
    assert asked and isinstance(result.final_output, str)


def test_the_example_calls_a_tool():
    server = LiveServer(MODEL, "--max-model-len=2048", "--generation-config=auto")
    command = [sys.executable, str(EXAMPLE), f"{server.url}/v1"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    finally:
        assert server.stop() == 0
    assert done.returncode == 0, done.stderr
    call, answer = done.stdout.splitlines()
    assert call.startswith("get_population {") and "Paris" in call
    assert re.search(r"2[.,]1", answer), answer
