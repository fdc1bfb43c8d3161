"""A tool loop: the model calls a function, the program runs it, the model answers with the result.

Needs a server: `octavo serve smollm2`. A URL may be given.
"""

import json
import sys

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_population", "parameters": PARAMETERS}


def get_population(city: str) -> str:
    return json.dumps({"city": city, "population": 2_103_000})


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")
options = {"model": client.models.list().data[0].id, "temperature": 0, "max_tokens": 60}
options["tools"] = [{"type": "function", "function": FUNCTION}]
messages = [{"role": "user", "content": "How many people live in Paris?"}]
create = client.chat.completions.create
reply = create(messages=messages, tool_choice="required", parallel_tool_calls=False, **options)
messages.append(reply.choices[0].message)
for call in messages[-1].tool_calls:
    print(call.function.name, call.function.arguments)
    result = get_population(**json.loads(call.function.arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
answer = create(messages=messages, tool_choice="none", **options)
print(answer.choices[0].message.content)
