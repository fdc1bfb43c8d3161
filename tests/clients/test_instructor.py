"""instructor: modes that ask for JSON in plain words, and those that force a form."""

import instructor
import openai
import pytest
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel

from tests.clients.conftest import MODEL, QUESTION


class Capital(BaseModel):
    name: str


def client(base_url, mode):
    return instructor.from_openai(
        openai.OpenAI(base_url=base_url, api_key="none", max_retries=0), mode=mode
    )


def test_json_in_plain_words_reaches_the_model(base_url):
    """The request is answered; whether so small a model writes the JSON asked for is its own."""
    asked = []
    patched = client(base_url, instructor.Mode.MD_JSON)
    patched.on("completion:response", asked.append)
    options = {"model": MODEL, "temperature": 0, "max_tokens": 200, "max_retries": 0}
    talk = [{"role": "user", "content": QUESTION}]
    try:
        found = patched.chat.completions.create(response_model=Capital, messages=talk, **options)
        assert isinstance(found, Capital)
    except (InstructorRetryException, IncompleteOutputException) as error:
        assert not isinstance(error.__cause__, openai.APIError), error
    assert len(asked) == 1 and asked[0].choices[0].message.content


MODES = ("TOOLS", "JSON_SCHEMA")


@pytest.mark.parametrize("mode", MODES)
def test_forced_forms_give_the_model_asked_for(base_url, mode):
    found = client(base_url, getattr(instructor.Mode, mode)).chat.completions.create(
        response_model=Capital,
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=300,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(found, Capital)
