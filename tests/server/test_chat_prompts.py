"""What becomes of a conversation before it is answered: continued messages, cut prompts, calls of
tools in the history, templates.
"""

import json

import pytest

from tests.support.live_server import LETTERS, LiveServer, events_of, ids_of
from tests.support.tiny_tokenizer import tiny_model_that_infills

HELLO = [{"role": "user", "content": "Hello"}]
PREFILLED = [*HELLO, {"role": "assistant", "content": "The answer "}]
SHORT = {"max_tokens": 4, "allowed_token_ids": LETTERS, "ignore_eos": True, "seed": 5}
PATH = "/v1/chat/completions"

TOOLS = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.arguments.city }}#{{ m.tool_calls[0].id }}{% endif %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
    "{% if messages[0].content == 'no' %}{{ raise_exception('say something else') }}{% endif %}"
)


@pytest.fixture(scope="module")
def trusting():
    """A server that trusts templates; its own knows an effort, and its model infills."""
    server = LiveServer(
        str(tiny_model_that_infills()), "--trust-request-chat-template", f"--chat-template={TOOLS}"
    )
    yield server
    assert server.stop() == 0


def ask(http, messages, **fields):
    answer = http.post(PATH, json={"messages": messages} | SHORT | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(http, messages, **fields):
    return ask(http, messages, return_prompt_text=True, **fields)["prompt_text"]


def refusal(http, messages, **fields):
    answer = http.post(PATH, json={"messages": messages} | SHORT | fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_a_last_message_is_continued(http):
    text = prompt_of(http, PREFILLED, continue_final_message=True)
    assert text == "<|turn|>user:Hello<|turn|>assistant:The answer "
    assert prompt_of(http, PREFILLED).endswith("<|turn|>assistant:")
    closed = prompt_of(http, PREFILLED, add_generation_prompt=False)
    assert closed == text  # this template ends no message


def test_a_continued_answer_equals_the_completion_of_its_text(http):
    chat = ask(http, PREFILLED, continue_final_message=True)
    body = {"prompt": [3, *ids_of("user:Hello"), 3, *ids_of("assistant:The answer ")]} | SHORT
    plain = http.post("/v1/completions", json=body).json()
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]


def test_only_an_assistant_s_message_is_continued(http):
    error = refusal(http, HELLO, continue_final_message=True)
    assert error["param"] == "continue_final_message" and "'assistant'" in error["message"]


@pytest.mark.parametrize("streams", [False, True])
def test_an_echo_begins_with_the_continued_text(http, streams):
    body = {"messages": PREFILLED, "continue_final_message": True, "stream": streams} | SHORT
    plain, echoed = (http.post(PATH, json=body | {"echo": echo}) for echo in (False, True))
    if streams:
        texts = [
            "".join(
                event["choices"][0]["delta"].get("content", "")
                for event in events_of(answer.iter_lines())
            )
            for answer in (plain, echoed)
        ]
    else:
        texts = [one.json()["choices"][0]["message"]["content"] for one in (plain, echoed)]
    assert texts[1] == "The answer " + texts[0] and len(texts[0]) == 4


def test_an_echo_of_a_user_s_message_is_none(http):
    assert len(ask(http, HELLO, echo=True)["choices"][0]["message"]["content"]) == 4


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-6, None)), ("right", slice(0, 6))])
def test_a_prompt_is_cut_at_either_side(http, side, kept):
    whole = ask(http, HELLO, return_token_ids=True)["prompt_token_ids"]
    cut = ask(http, HELLO, return_token_ids=True, truncate_prompt_tokens=6, truncation_side=side)
    assert cut["prompt_token_ids"] == whole[kept] and cut["usage"]["prompt_tokens"] == 6


def test_a_prompt_beyond_the_context_is_cut_so_that_the_answer_has_room(http):
    long = [{"role": "user", "content": "a" * 5000}]
    assert ask(http, long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 508
    assert refusal(http, long)["param"] in ("prompt", "messages")
    for prompt in ("a" * 5000, [70] * 5000):
        body = {"prompt": prompt, "truncate_prompt_tokens": -1} | SHORT
        usage = http.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens"] == 508


def test_the_prompt_s_text_comes_with_a_stream_s_first_chunk(http):
    body = {"messages": HELLO, "stream": True, "return_prompt_text": True} | SHORT
    first, *others = events_of(http.post(PATH, json=body).iter_lines())
    assert first["prompt_text"] == "<|turn|>user:Hello<|turn|>assistant:"
    assert all("prompt_text" not in event for event in others)
    body = {"prompt": "<bos>Hi", "return_prompt_text": True} | SHORT
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["prompt_text"] == "<bos>Hi"


def test_answers_of_one_server_have_one_fingerprint(http, trusting):
    mine = {ask(http, HELLO)["system_fingerprint"] for _ in range(2)}
    mine.add(http.post("/v1/completions", json={"prompt": "a"}).json()["system_fingerprint"])
    with trusting.http() as other:
        mine.add(ask(other, HELLO)["system_fingerprint"])
    assert len(mine) == 2 and all(name.startswith("fp_") for name in mine)


def test_usage_tells_apart_the_tokens_of_reasoning(http):
    usage = ask(http, HELLO)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_developer_speaks_as_the_system(http):
    talk = [{"role": "developer", "content": "Be brief."}, *HELLO]
    assert prompt_of(http, talk).startswith("<|turn|>system:Be brief.<|turn|>user")


def test_calls_of_tools_stay_in_the_history(trusting):
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": json.dumps({"city": "Oslo"})},
    }
    talk = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    with trusting.http() as http:
        text = prompt_of(http, talk)
        assert text.endswith("<|turn|>assistant:Oslo#c1<|turn|>tool:rain#c1")
        cut = {**call, "function": {"name": "weather", "arguments": '{"city": "Os'}}
        text = prompt_of(http, [*HELLO, {"role": "assistant", "tool_calls": [cut]}])
        assert text.endswith("<|turn|>assistant:Os#c1")
        error = refusal(http, [{"role": "user", "content": "a", "tool_call_id": "c1"}])
        assert error["param"] == "messages[0].tool_call_id"


def test_a_template_of_the_request_is_used_where_it_is_trusted(http, trusting):
    with trusting.http() as other:
        text = prompt_of(other, HELLO, chat_template="{{ messages[0].content }}!")
        assert text == "Hello!"
        error = refusal(other, HELLO, chat_template="{{")
        assert error["param"] == "messages" and "chat template failed" in error["message"]
        error = refusal(other, HELLO, chat_template="x" * 100_001)
        assert error["param"] == "chat_template"
    error = refusal(http, HELLO, chat_template="a")
    assert "--trust-request-chat-template" in error["message"]


def test_an_effort_goes_to_a_template_that_reads_it(trusting):
    with trusting.http() as http:
        assert prompt_of(http, HELLO, reasoning_effort="high").endswith("[high]")


def test_what_a_template_says_reaches_its_client(trusting):
    with trusting.http() as http:
        error = refusal(http, [{"role": "user", "content": "no"}])
    assert "the chat template failed: say something else" in error["message"]


def test_parts_of_other_kinds_are_refused_by_their_place(http):
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert prompt_of(http, [{"role": "user", "content": parts}]).startswith("<|turn|>user:a\nb")
    for kind in ("input_audio", "file", "video_url", "image_url"):
        error = refusal(http, [{"role": "user", "content": [{"type": kind, kind: {}}]}])
        assert error["param"].startswith("messages[0].content[0]")


def test_a_suffix_makes_a_prompt_for_filling_in_the_middle(trusting):
    body = {"prompt": "a<eos>", "suffix": " c", "return_token_ids": True} | SHORT
    with trusting.http() as http:
        (choice,) = http.post("/v1/completions", json=body).json()["choices"]
        assert choice["prompt_token_ids"] == [260, *ids_of("a<eos>"), 261, *ids_of(" c"), 262]
        assert len(choice["text"]) == 4
        for more in ({"prompt": [5]}, {"echo": True}, {"truncate_prompt_tokens": 3}):
            error = http.post("/v1/completions", json=body | more).json()["error"]
            assert error["param"] == "suffix"
        features = http.get("/v1/capabilities").json()["features"]
    assert features["infill"] == "starcoder" and features["request_chat_template"]
