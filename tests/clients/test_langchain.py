"""langchain-openai: chat, streams, a chain, completions, counting of tokens in the answer."""

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.conftest import MODEL, QUESTION


def model(base_url, **options):
    return ChatOpenAI(
        base_url=base_url, api_key="none", model=MODEL, temperature=0, max_tokens=12, **options
    )


def test_invoke_and_stream(base_url, answer):
    found = model(base_url).invoke(QUESTION)
    assert found.content == answer and found.usage_metadata["output_tokens"] <= 12
    parts = list(model(base_url, stream_usage=True).stream(QUESTION))
    assert "".join(part.content for part in parts) == answer
    assert parts[-1].usage_metadata or any(part.usage_metadata for part in parts)


def test_a_chain_and_a_batch(base_url, answer):
    prompt = ChatPromptTemplate.from_messages([("user", "{question}")])
    chain = prompt | model(base_url) | StrOutputParser()
    assert chain.batch([{"question": QUESTION}] * 3) == [answer] * 3


def test_a_conversation_of_several_turns(base_url):
    talk = [
        SystemMessage("You are brief."),
        HumanMessage("Say hello."),
        AIMessage("Hello!"),
        HumanMessage(QUESTION),
    ]
    found = model(base_url).invoke(talk)
    assert found.content and found.usage_metadata["input_tokens"] > 40


def test_logprobs_come_along(base_url):
    found = model(base_url, logprobs=True, top_logprobs=2).invoke(QUESTION)
    first = found.response_metadata["logprobs"]["content"][0]
    assert len(first["top_logprobs"]) == 2 and first["logprob"] <= 0


def test_completions(base_url):
    client = OpenAI(base_url=base_url, api_key="none", model=MODEL, temperature=0, max_tokens=6)
    assert "Paris" in client.invoke("The capital of France is")


class Capital(BaseModel):
    """The capital of a country."""

    city: str = Field(max_length=20)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(base_url, method):
    client = ChatOpenAI(
        base_url=base_url, api_key="none", model=MODEL, temperature=0, max_tokens=200
    )
    found = client.with_structured_output(Capital, method=method).invoke(QUESTION)
    assert isinstance(found, Capital)


def test_bound_tools_are_called(base_url):
    client = ChatOpenAI(
        base_url=base_url, api_key="none", model=MODEL, temperature=0, max_tokens=200
    )
    bound = client.bind_tools([Capital], tool_choice="any", parallel_tool_calls=False)
    assert [call["name"] for call in bound.invoke(QUESTION).tool_calls] == ["Capital"]
    streamed = list(bound.stream(QUESTION))
    whole = streamed[0]
    for part in streamed[1:]:
        whole += part
    assert "city" in whole.tool_calls[0]["args"]
