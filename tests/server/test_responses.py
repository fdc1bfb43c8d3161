"""/v1/responses, through OpenAI's client and over plain HTTP."""

import json

import openai
import pytest

from tests.support.live_server import LETTERS, until

LETTERS_ONLY = {"allowed_token_ids": LETTERS, "ignore_eos": True}
SHORT = {
    "model": "tiny",
    "input": "Hello",
    "max_output_tokens": 12,
    "temperature": 1,
    "extra_body": {"seed": 3, **LETTERS_ONLY},
}
ENDLESS = {**SHORT, "max_output_tokens": 450, "background": True}


def ended(client, response):
    """Returns a background response when it has ended."""
    assert until(
        lambda: client.responses.retrieve(response.id).status not in ("queued", "in_progress")
    )
    return client.responses.retrieve(response.id)


def test_a_response_has_the_answer_that_chat_gives(kept):
    response = kept.responses.create(**SHORT)
    chat = kept.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=12,
        temperature=1,
        seed=3,
        extra_body=LETTERS_ONLY,
    )
    assert response.output_text == chat.choices[0].message.content
    assert (response.object, response.model, response.status) == ("response", "tiny", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert (response.usage.output_tokens, response.output[0].role) == (12, "assistant")
    assert (response.store, response.background, response.truncation) == (True, False, "disabled")


def test_an_answer_that_ends_by_itself_is_completed(kept):
    response = kept.responses.create(
        **{**SHORT, "extra_body": {**SHORT["extra_body"], "stop": "a"}}
    )
    assert response.status in ("completed", "incomplete")
    long = {**SHORT, "max_output_tokens": 400}
    response = kept.responses.create(**{**long, "extra_body": {**SHORT["extra_body"], "stop": "a"}})
    assert response.status == "completed" and response.completed_at >= response.created_at
    assert response.output[0].status == "completed" and "a" not in response.output_text


def test_a_stored_response_is_fetched_listed_and_deleted(kept):
    made = kept.responses.create(**SHORT, metadata={"topic": "greeting"}, instructions="Be brief.")
    found = kept.responses.retrieve(made.id)
    assert found == made and found.metadata == {"topic": "greeting"}
    items = kept.responses.input_items.list(made.id).data
    assert [(item.role, item.content[0].text) for item in items] == [("user", "Hello")]
    assert kept.responses.delete(made.id) is None
    with pytest.raises(openai.NotFoundError):
        kept.responses.retrieve(made.id)


def test_a_response_that_is_not_to_be_stored_is_not(kept):
    made = kept.responses.create(**SHORT, store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        kept.responses.retrieve(made.id)


def test_a_response_answers_to_its_key_alone(kept, other):
    made = kept.responses.create(**SHORT)
    for ask in (
        other.responses.retrieve,
        other.responses.delete,
        other.responses.cancel,
        other.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        other.responses.create(**SHORT, previous_response_id=made.id)
    assert kept.responses.retrieve(made.id) == made


def test_a_conversation_goes_on_from_what_is_stored(kept):
    first = kept.responses.create(**SHORT, instructions="Say something.")
    second = kept.responses.create(**SHORT | {"input": "More"}, previous_response_id=first.id)
    third = kept.responses.create(
        **SHORT | {"input": [{"role": "developer", "content": "Again"}]},
        previous_response_id=second.id,
    )
    whole = kept.responses.create(
        **SHORT
        | {
            "input": [
                {"role": "user", "content": "Hello"},
                first.output[0].to_dict(),
                {"role": "user", "content": [{"type": "input_text", "text": "More"}]},
                {"role": "assistant", "content": second.output_text},
                {"role": "system", "content": "Again"},
            ]
        }
    )
    assert third.usage.input_tokens == whole.usage.input_tokens
    assert third.output_text == whole.output_text
    assert third.usage.input_tokens_details.cached_tokens > 0


def test_the_items_of_a_whole_conversation_are_listed(kept):
    first = kept.responses.create(**SHORT)
    second = kept.responses.create(**SHORT | {"input": "More"}, previous_response_id=first.id)
    told = kept.responses.input_items.list(second.id, order="asc").data
    assert [item.content[0].text for item in told] == ["Hello", first.output_text, "More"]
    newest = kept.responses.input_items.list(second.id, limit=1)
    assert newest.data == told[-1:] and newest.has_more
    kept.responses.delete(first.id)
    assert kept.responses.input_items.list(second.id).data == told[-1:]


def test_an_item_of_an_answer_may_be_named_in_its_place(kept, other):
    """Clients such as the Vercel AI SDK send a conversation back so."""
    first = kept.responses.create(**SHORT)
    turns = [{"role": "user", "content": "Hello"}, {"role": "user", "content": "More"}]
    named = {"type": "item_reference", "id": first.output[0].id}
    by_name = kept.responses.create(**SHORT | {"input": [turns[0], named, turns[1]]})
    whole = kept.responses.create(
        **SHORT | {"input": [turns[0], first.output[0].to_dict(), turns[1]]}
    )
    assert by_name.output_text == whole.output_text
    assert by_name.usage.input_tokens == whole.usage.input_tokens
    kept.responses.delete(first.id)
    assert kept.responses.input_items.list(by_name.id).data[1].id == first.output[0].id
    mine = kept.responses.create(**SHORT).output[0].id
    for client, item_id in ((other, mine), (kept, named["id"])):
        with pytest.raises(openai.BadRequestError, match=r"input\[0\].id: no item"):
            client.responses.create(**SHORT | {"input": [{**named, "id": item_id}]})
    with_foreign = {"input": [{**named, "id": "rs_68a"}, turns[0]]}
    answer = kept.responses.with_raw_response.create(**SHORT | with_foreign)
    assert answer.headers["x-octavo-ignored"] == "input[type=item_reference]"


EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]


def test_a_stream_has_typed_events_in_order(kept):
    events = list(kept.responses.create(**SHORT, stream=True))
    assert list(dict.fromkeys(event.type for event in events)) == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == EVENTS[4])
    assert len(text) == 12 and events[-1].response.output_text == text
    assert kept.responses.retrieve(events[0].response.id) == events[-1].response
    with kept.responses.stream(**SHORT) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"
    assert text == kept.responses.create(**SHORT).output_text


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def test_logprobs_of_the_text_are_included(kept):
    """They are those of chat, in the whole response, in each delta and at the end of a stream."""
    whole = kept.responses.create(**SHORT, **LOGPROBS)
    found = whole.output[0].content[0].logprobs
    chat = kept.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=12,
        temperature=1,
        logprobs=True,
        top_logprobs=2,
        extra_body=SHORT["extra_body"],
    )
    expected = [one.model_dump() for one in chat.choices[0].logprobs.content]
    assert [one.model_dump() for one in found] == expected and len(found) == 12
    assert whole.top_logprobs == 2
    events = list(kept.responses.create(**SHORT, **LOGPROBS, stream=True))
    told = [one for event in events if event.type == EVENTS[4] for one in event.logprobs]
    assert [one.token for one in told] == [one.token for one in found]
    assert [one.logprob for one in told] == [one.logprob for one in found]
    done = next(event for event in events if event.type == EVENTS[5])
    assert [one.logprob for one in done.logprobs] == [one.logprob for one in found]
    assert events[-1].response.output[0].content[0].logprobs == found
    assert kept.responses.create(**SHORT).output[0].content[0].logprobs == []


def test_a_background_response_keeps_its_logprobs(kept):
    events = list(kept.responses.create(**SHORT, **LOGPROBS, background=True, stream=True))
    response = events[-1].response
    assert len(response.output[0].content[0].logprobs) == 12
    assert list(kept.responses.retrieve(response.id, stream=True)) == events
    assert kept.responses.retrieve(response.id) == response


def test_input_tokens_are_those_that_a_response_counts(kept):
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    first = kept.responses.create(**SHORT)
    for fields in (
        {"input": "Hello"},
        {"input": "Hello", "instructions": "Be brief."},
        {"input": [{"role": "user", "content": "Hello"}]},
        {"input": "And?", "previous_response_id": first.id},
        {"input": "Hello", "tools": [tool]},
    ):
        counted = kept.responses.input_tokens.count(model="tiny", **fields)
        made = kept.responses.create(model="tiny", max_output_tokens=1, **fields)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == made.usage.input_tokens > 0
    with pytest.raises(openai.NotFoundError):
        kept.responses.input_tokens.count(model="other", input="Hello")
    with pytest.raises(openai.BadRequestError, match="input"):
        kept.responses.input_tokens.count(model="tiny")


def test_what_cannot_be_included_is_named_in_a_header(keeper):
    body = {"input": "Hi", "max_output_tokens": 1, "include": ["file_search_call.results"]}
    with keeper.http() as http:
        answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-octavo-ignored"] == "include[file_search_call.results]"


def test_the_stream_on_the_wire_names_each_event(keeper):
    body = {"input": "Hello", "stream": True, "max_output_tokens": 2, **LETTERS_ONLY}
    with keeper.http() as http, http.stream("POST", "/v1/responses", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [event["type"] for event in events]
    assert names[-1] == "response.incomplete", "no [DONE] follows"


def test_a_background_response_is_fetched_when_it_has_ended(kept):
    made = kept.responses.create(**SHORT, background=True)
    assert (made.status, made.output) == ("queued", [])
    found = ended(kept, made)
    assert found.output_text == kept.responses.create(**SHORT).output_text
    with pytest.raises(openai.BadRequestError, match="background"):
        kept.responses.create(**SHORT, background=True, store=False)


def test_a_background_stream_is_told_again_from_any_event(kept):
    events = list(kept.responses.create(**SHORT, background=True, stream=True))
    assert events[1].type == "response.queued"
    response_id = events[0].response.id
    assert list(kept.responses.retrieve(response_id, stream=True)) == events
    later = list(kept.responses.retrieve(response_id, stream=True, starting_after=5))
    assert later == events[6:]


def test_a_running_background_response_is_followed_by_several(kept):
    made = kept.responses.create(**{**ENDLESS, "max_output_tokens": 200})
    told = [list(kept.responses.retrieve(made.id, stream=True)) for _ in range(2)]
    assert told[0] == told[1] and told[0][-1].response == ended(kept, made)


def test_a_background_response_is_cancelled(keeper, kept):
    made = kept.responses.create(**ENDLESS)
    cancelled = kept.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert kept.responses.retrieve(made.id) == cancelled
    assert kept.responses.cancel(made.id) == cancelled, "once more changes nothing"
    assert until(lambda: keeper.metric("num_requests_running") == 0)
    with pytest.raises(openai.BadRequestError, match="background"):
        kept.responses.cancel(kept.responses.create(**SHORT).id)


def test_a_deleted_background_response_stops(keeper, kept):
    made = kept.responses.create(**ENDLESS)
    kept.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        kept.responses.retrieve(made.id)
    assert until(lambda: keeper.metric("num_requests_running") == 0)


def test_truncation_drops_the_oldest_where_the_context_is_full(kept):
    turns = [{"role": "user", "content": f"{index} " + "x" * 100} for index in range(9)]
    with pytest.raises(openai.BadRequestError, match="tokens"):
        kept.responses.create(**SHORT | {"input": turns})
    made = kept.responses.create(**SHORT | {"input": turns}, truncation="auto")
    assert made.usage.input_tokens + 12 <= 512
    fewer = kept.responses.create(**SHORT | {"input": turns[-4:]})
    assert made.output_text == fewer.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": " "}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0]"),
        ({"input": [{"type": "item_reference"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"truncation": "some"}, "truncation"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"temperature": 9}, "temperature"),
    ],
)
def test_what_a_response_cannot_have_is_refused_by_name(strict, fields, param):
    response = strict.post("/v1/responses", json={"input": "Hello"} | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_fields_that_mean_nothing_here_are_taken(keeper):
    fields = {
        "tools": [],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": None, "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_retention": "24h",
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "user": "u",
    }
    with keeper.http() as http:
        response = http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1} | fields)
    assert response.status_code == 200, response.text


def test_a_server_that_keeps_nothing_still_answers(http):
    body = {"input": "Hello", "max_output_tokens": 2}
    response = http.post("/v1/responses", json=body)
    assert response.status_code == 200 and response.json()["store"] is False
    for name, value in (("store", True), ("background", True), ("previous_response_id", "x")):
        error = http.post("/v1/responses", json=body | {name: value}).json()["error"]
        assert (error["code"], error["param"]) == (400, name) and "--state-dir" in error["message"]
    for path in ("/v1/responses/x", "/v1/files", "/v1/batches"):
        assert http.get(path).status_code == 404
