"""An agent with OpenAI's Agents SDK: the model calls a function and answers with its result.

    $ pip install openai-agents
    $ octavo serve smollm2
    $ python agents_sdk.py
    get_population {"city": "Paris"}
    The population of Paris is 2.1 million.

Optional argument: the URL of the server.
"""

import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    ToolCallItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"


@function_tool
def get_population(city: str) -> str:
    """Returns the number of inhabitants of a city."""
    return {"Paris": "2,103,000"}.get(city, "unknown")


set_tracing_disabled(disabled=True)  # traces would be sent to OpenAI
agent = Agent(
    name="Geographer",
    instructions="Answer in one short sentence.",
    model=OpenAIChatCompletionsModel("smollm2", AsyncOpenAI(base_url=url, api_key="none")),
    # A small model rarely decides to call a function by itself; larger ones need no tool_choice.
    model_settings=ModelSettings(
        temperature=0, max_tokens=100, tool_choice="required", parallel_tool_calls=False
    ),
    tools=[get_population],
)
result = Runner.run_sync(agent, "What is the population of Paris?")
for item in result.new_items:
    if isinstance(item, ToolCallItem):
        print(item.raw_item.name, item.raw_item.arguments)
print(result.final_output)
