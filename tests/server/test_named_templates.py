"""A request is rendered with the model's template for tools where it has tools, and may name any of
the model's templates, also if the server trusts no template of a request.
"""

import pytest

from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_named_templates

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


@pytest.fixture(scope="module")
def http():
    server = LiveServer(str(tiny_model_with_named_templates()))
    with server.http() as client:
        yield client
    assert server.stop() == 0


def post(http, **fields):
    body = {"messages": HELLO, "max_tokens": 1, "return_prompt_text": True} | fields
    return http.post("/v1/chat/completions", json=body)


def prompt_of(http, **fields):
    answer = post(http, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt_text"]


def test_tools_choose_the_template_for_tools(http):
    plain = prompt_of(http)
    assert "Hello" in plain and "weather" not in plain
    assert prompt_of(http, tools=TOOLS) == "weather<tool_call>"
    assert prompt_of(http, tools=[]) == plain
    assert prompt_of(http, tools=TOOLS, chat_template="default") == plain


def test_a_request_names_a_template(http):
    documents = [{"text": "Oslo"}]
    assert prompt_of(http, chat_template="rag", documents=documents) == "Oslo:Hello"
    assert prompt_of(http, chat_template="default") == prompt_of(http)
    answer = post(http, chat_template="rga")
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "it has 'rag', 'tool_use', 'default'" in message
    assert "--trust-request-chat-template" in message
