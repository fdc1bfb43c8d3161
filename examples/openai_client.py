"""The openai package against a running server: `octavo serve`, then this. A URL may be given."""

import sys

from openai import OpenAI

client = OpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none"
)
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    max_tokens=40,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(
            f"\n({chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} new"
            " tokens)"
        )
