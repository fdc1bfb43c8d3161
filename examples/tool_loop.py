"""A tool loop: the model calls a function, the program runs it, the model answers with the result.

    $ octavo serve smollm2
    $ python tool_loop.py
    get_population {"city": "Paris"}
    The population of Paris is approximately 2.1 million.

Optional argument: the URL of the server.
"""

import json
import sys

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_population", "parameters": PARAMETERS}}


def get_population(city: str) -> str:
    return {"Paris": "2,103,000"}.get(city, "unknown")


client = OpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none"
)
options = {"model": "smollm2", "temperature": 0, "max_tokens": 60, "tools": [TOOL]}
messages = [{"role": "user", "content": "What is the population of Paris?"}]

# A small model rarely decides to call a function by itself; larger ones need no tool_choice.
response = client.chat.completions.create(
    messages=messages, tool_choice="required", parallel_tool_calls=False, **options
)
messages.append(response.choices[0].message)
for call in response.choices[0].message.tool_calls:
    print(call.function.name, call.function.arguments)
    result = get_population(**json.loads(call.function.arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

response = client.chat.completions.create(messages=messages, tool_choice="none", **options)
print(response.choices[0].message.content)
