"""POST /tokenize, /detokenize and /apply-template, GET /tokenizer_info: they say what the engine
would be given.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.live_server import ids_of
from tests.support.tiers import examples
from tests.support.tiny_tokenizer import TEMPLATE

HELLO = [{"role": "user", "content": "Hello"}]


def post(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_and_back(http, prefix):
    found = post(http, f"{prefix}/tokenize", prompt="<eos>Hi", model="tiny")
    assert found == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [2, *ids_of("Hi")],
        "token_strs": None,
    }
    back = post(http, f"{prefix}/detokenize", tokens=found["tokens"])
    assert back == {"prompt": "<eos>Hi", "content": "<eos>Hi"}
    plain = post(http, f"{prefix}/detokenize", tokens=found["tokens"], skip_special_tokens=True)
    assert plain["prompt"] == "Hi"


def test_token_texts_and_pieces(http):
    found = post(http, "/tokenize", content="é", with_pieces=True, return_token_strs=True)
    first, second = ids_of("é")
    assert found["tokens"] == [{"id": first, "piece": [195]}, {"id": second, "piece": [169]}]
    assert found["token_strs"] == ["<0xC3>", "<0xA9>"] and found["count"] == 2
    found = post(http, "/tokenize", content="<eos>", parse_special=False)
    assert found["tokens"] == ids_of("<eos>")


def test_a_conversation_is_tokenized_as_it_would_be_answered(http):
    found = post(http, "/tokenize", messages=HELLO)["tokens"]
    asked = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}
    assert found == post(http, "/v1/chat/completions", **asked)["prompt_token_ids"]
    shorter = post(http, "/tokenize", messages=HELLO, add_generation_prompt=False)["tokens"]
    assert found[: len(shorter)] == shorter and len(shorter) < len(found)


def test_a_conversation_as_the_template_writes_it(http):
    text = post(http, "/apply-template", messages=HELLO)["prompt"]
    assert text == "<|turn|>user:Hello<|turn|>assistant:"
    talk = [*HELLO, {"role": "assistant", "content": "<eos> is"}]
    text = post(http, "/apply-template", messages=talk, continue_final_message=True)["prompt"]
    assert text == "<|turn|>user:Hello<|turn|>assistant:<eos> is"


def test_texts_beyond_the_context_are_counted(http):
    assert post(http, "/tokenize", prompt="a" * 5000)["count"] == 5000
    long = [{"role": "user", "content": "a" * 5000}]
    assert post(http, "/tokenize", messages=long)["count"] > 5000


def test_the_tokenizer_describes_itself(http):
    info = http.get("/tokenizer_info", params={"model": "tiny"}).json()
    assert info["vocab_size"] == 260 and info["special_tokens"]["<eos>"] == 2
    assert (info["bos_token"], info["eos_token"]) == ("<bos>", "<eos>")
    assert info["chat_template"] == TEMPLATE and info["template_variables"] == [
        "add_generation_prompt",
        "messages",
    ]
    assert http.get("/tokenizer_info", params={"model": "x"}).status_code == 404


def test_what_makes_no_sense_is_refused_by_name(http):
    assert refusal(http, "/tokenize") == "prompt"
    assert refusal(http, "/tokenize", prompt="a", messages=HELLO) == "prompt"
    both = {"add_special": True, "add_special_tokens": False}
    assert refusal(http, "/tokenize", prompt="a", **both) == "add_special"
    assert refusal(http, "/detokenize", tokens=[320]) == "tokens"
    assert refusal(http, "/detokenize", tokens=[-1]) == "tokens"
    assert refusal(http, "/detokenize", tokens="a") == "tokens"
    assert refusal(http, "/apply-template", messages=[]) == "messages"
    assert refusal(http, "/apply-template", messages=HELLO, chat_template="a") == "chat_template"


@settings(max_examples=examples(40), deadline=None)
@given(st.text(max_size=30))
def test_every_text_comes_back(server, text):
    with server.http() as http:
        found = http.post("/tokenize", json={"prompt": text})
        assert found.status_code == 200
        back = http.post("/detokenize", json={"tokens": found.json()["tokens"]})
    assert back.json()["prompt"] == text
