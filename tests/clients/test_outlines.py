"""outlines: its types through OpenAI's form, and through vLLM's structured_outputs."""

import json
from typing import Annotated, Literal

import openai
import outlines
import pytest
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field

from tests.clients.conftest import MODEL, QUESTION

OPTIONS = {"max_tokens": 200, "temperature": 0}


class City(BaseModel, extra="forbid"):
    name: Annotated[str, Field(max_length=20)]
    population: Annotated[int, Field(ge=0, le=99_999_999)]


@pytest.fixture
def client(base_url):
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


@pytest.mark.parametrize("way", ["from_openai", "from_vllm"])
def test_a_model_of_pydantic_is_met(client, way):
    model = getattr(outlines, way)(client, MODEL)
    City.model_validate_json(model(QUESTION, City, **OPTIONS))


def test_choices_regexes_and_grammars_are_met(client):
    model = outlines.from_vllm(client, MODEL)
    assert model(QUESTION, Literal["Paris", "Rome"], **OPTIONS) in ("Paris", "Rome")
    assert model(QUESTION, Regex("[A-Z][a-z]{2,5}"), **OPTIONS).istitle()
    assert model(QUESTION, CFG('start: "Paris" | "Rome"'), **OPTIONS) in ("Paris", "Rome")


def test_a_stream_joins_to_the_form(client):
    stream = outlines.Generator(outlines.from_vllm(client, MODEL), City).stream(QUESTION, **OPTIONS)
    assert set(json.loads("".join(stream))) == {"name", "population"}
