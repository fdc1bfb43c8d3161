"""llama-index: OpenAILike as chat and as completion model, whole and streamed."""

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from tests.clients.conftest import MODEL, QUESTION


@pytest.fixture
def model(base_url):
    return OpenAILike(
        model=MODEL,
        api_base=base_url,
        api_key="none",
        is_chat_model=True,
        context_window=2048,
        temperature=0,
        max_tokens=12,
    )


def test_chat_whole_and_streamed(model, answer):
    talk = [ChatMessage(role="user", content=QUESTION)]
    assert model.chat(talk).message.content == answer
    assert "".join(part.delta or "" for part in model.stream_chat(talk)) == answer


def test_complete(model, base_url, answer):
    assert model.complete(QUESTION).text == answer
    plain = model.model_copy(update={"is_chat_model": False})
    assert "Paris" in plain.complete("The capital of France is").text
