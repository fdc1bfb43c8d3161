"""instructor: its modes that ask for JSON in plain words; those that force a form are refused."""

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


@pytest.mark.parametrize(
    ("mode", "param"),
    [(instructor.Mode.JSON, "response_format"), (instructor.Mode.TOOLS, "tools")],
    ids=["json", "tools"],
)
def test_forced_forms_are_refused_by_name(base_url, mode, param):
    with pytest.raises(Exception, match=param):
        client(base_url, mode).chat.completions.create(
            response_model=Capital,
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            max_retries=0,
        )
