"""Stream a chat response with the openai package.

    $ octavo serve smollm2
    $ python openai_client.py
    The capital of France is Paris.
    37 + 8 tokens

Optional argument: the URL of the server.
"""

import sys

from openai import OpenAI

client = OpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none"
)
stream = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Name the capital of France."}],
    temperature=0,
    max_tokens=40,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f"\n{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")
