"""The Vercel AI SDK, in Node.js: generateText, streamText, a completion model, an error, and its
OpenAI provider's conversation.
"""

import json
import subprocess
from pathlib import Path

from tests.clients.conftest import MODEL, QUESTION

NODE = Path(__file__).parent / "node"


def run(script, *arguments):
    """Runs a script of this folder; returns what it prints."""
    command = ["node", str(NODE / script), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_the_sdk_generates_and_streams(base_url, answer):
    found = run("ask.mjs", base_url, MODEL, QUESTION)
    assert found["whole"] == found["streamed"] == answer
    assert "Paris" in found["completed"] and found["usage"]["outputTokens"] <= 12
    assert found["refusal"].startswith("400 temperature: got 5")


def test_a_conversation_names_the_answers_that_the_server_keeps(base_url, server, answer):
    """The provider sends an earlier answer back by its id alone."""
    more = "And of Italy?"
    found = run("talk.mjs", base_url, MODEL, QUESTION, more)
    assert found["first"] == answer and found["kinds"][1] == "item_reference"
    talk = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": more},
    ]
    body = {"messages": talk, "temperature": 0, "max_tokens": 12}
    with server.http() as http:
        plain = http.post("/v1/chat/completions", json=body).json()
    assert found["second"] == plain["choices"][0]["message"]["content"]
