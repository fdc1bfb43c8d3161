"""/v1/batches, through OpenAI's client: their lines, their end, their place behind all others."""

import json
import time

import openai
import pytest

from tests.support.live_server import LETTERS, LiveServer, until
from tests.support.tiny_tokenizer import tiny_model_with_text

ANSWER = {"max_tokens": 4, "temperature": 1, "seed": 5, "allowed_token_ids": LETTERS}
ENDED = ("completed", "failed", "expired", "cancelled")


def line(index, *, url="/v1/completions", **body):
    body = {"prompt": f"Line {index}", **ANSWER, **body}
    return {"custom_id": f"line-{index}", "method": "POST", "url": url, "body": body}


def upload(client, lines):
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    return client.files.create(file=("in.jsonl", "\n".join(texts).encode()), purpose="batch")


def start(client, lines, *, endpoint="/v1/completions", window="24h", **fields):
    return client.batches.create(
        input_file_id=upload(client, lines).id,
        endpoint=endpoint,
        completion_window=window,
        **fields,
    )


def ended(client, batch):
    assert until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def lines_of(client, file_id):
    if file_id is None:
        return {}
    lines = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    by_id = {one["custom_id"]: one for one in lines}
    assert len(by_id) == len(lines), "each line has one outcome"
    return by_id


def test_a_byte_order_mark_before_the_first_line_is_skipped(kept):
    text = "\n".join(map(json.dumps, (line(0), line(1))))
    file = kept.files.create(file=("in.jsonl", text.encode("utf-8-sig")), purpose="batch")
    batch = ended(
        kept,
        kept.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        ),
    )
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 2, "failed": 0}


def test_every_line_is_answered_as_its_route_answers(kept):
    made = start(kept, [line(index) for index in range(20)], metadata={"of": "test"})
    assert (made.object, made.status, made.metadata) == ("batch", "validating", {"of": "test"})
    batch = ended(kept, made)
    assert (batch.status, batch.error_file_id, batch.model) == ("completed", None, None)
    assert batch.request_counts.to_dict() == {"total": 20, "completed": 20, "failed": 0}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers = lines_of(kept, batch.output_file_id)
    assert list(answers) == [f"line-{index}" for index in range(20)], "in the order of the lines"
    alone = kept.completions.create(
        model="tiny",
        prompt="Line 7",
        max_tokens=4,
        temperature=1,
        seed=5,
        extra_body={"allowed_token_ids": LETTERS},
    )
    response = answers["line-7"]["response"]
    assert response["status_code"] == 200
    assert response["body"]["choices"][0]["text"] == alone.choices[0].text


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/responses"])
def test_chat_and_responses_run_in_batches_too(kept, endpoint):
    is_chat = "chat" in endpoint
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"input": "Hi"}
    asked |= {"max_tokens" if is_chat else "max_output_tokens": 3, "seed": 1}
    lines = [
        {"custom_id": str(index), "method": "POST", "url": endpoint, "body": asked}
        for index in range(3)
    ]
    batch = ended(kept, start(kept, lines, endpoint=endpoint))
    answers = lines_of(kept, batch.output_file_id)
    assert set(answers) == {"0", "1", "2"}
    assert {answer["response"]["status_code"] for answer in answers.values()} == {200}


def test_a_line_that_fails_is_reported_beside_the_others(kept):
    lines = [line(0), line(1, temperature=9), line(2, top_p=7), line(3)]
    batch = ended(kept, start(kept, lines))
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
    assert set(lines_of(kept, batch.output_file_id)) == {"line-0", "line-3"}
    errors = lines_of(kept, batch.error_file_id)
    assert [one["response"]["status_code"] for one in errors.values()] == [400, 400]
    assert errors["line-2"]["response"]["body"]["error"]["param"] == "top_p"


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line(0), "{not json"], "invalid_json_line", 2),
        ([line(0), "", line(0)], "duplicate_custom_id", 3),
        ([line(0) | {"method": "GET"}], "invalid_method", 1),
        ([line(0, url="/v1/embeddings")], "invalid_url", 1),
        ([line(0) | {"custom_id": ""}], "invalid_custom_id", 1),
        ([line(0) | {"body": [1]}], "invalid_body", 1),
        ([line(0, stream=True)], "invalid_body", 1),
        ([line(0, priority=-3)], "invalid_body", 1),
        ([line(0, model="tiny"), line(1, model="other")], "mismatched_model", 2),
        ([line(0) | {"colour": "red"}], "invalid_json_line", 1),
        ([" "], "empty_file", None),
        ([line(index) for index in range(101)], "too_many_requests", None),
    ],
)
def test_a_file_with_a_bad_line_fails_whole_and_says_where(kept, lines, code, number):
    batch = ended(kept, start(kept, lines))
    assert (batch.status, batch.output_file_id) == ("failed", None)
    error = batch.errors.data[0]
    assert (error.code, error.line) == (code, number) and error.message


def test_a_cancelled_batch_keeps_what_has_ended(keeper, kept):
    lines = [line(index, max_tokens=400, ignore_eos=True) for index in range(100)]
    made = start(kept, lines)
    assert until(lambda: kept.batches.retrieve(made.id).request_counts.completed >= 1)
    assert kept.batches.cancel(made.id).status == "cancelling"
    batch = ended(kept, made)
    assert batch.status == "cancelled" and batch.cancelled_at >= batch.cancelling_at
    answers = lines_of(kept, batch.output_file_id)
    assert 1 <= len(answers) == batch.request_counts.completed < 100
    assert until(lambda: keeper.metric("num_requests_running") == 0)
    with pytest.raises(openai.ConflictError):
        kept.batches.cancel(made.id)


def test_lines_that_had_no_time_are_reported_as_expired(kept):
    lines = [line(index, max_tokens=400, ignore_eos=True) for index in range(100)]
    batch = ended(kept, start(kept, lines, window="1s"))
    assert batch.status == "expired" and batch.expired_at
    answers = lines_of(kept, batch.output_file_id)
    errors = lines_of(kept, batch.error_file_id)
    assert len(answers) + len(errors) == 100 and not answers.keys() & errors.keys()
    assert errors["line-99"]["error"]["code"] == "batch_expired"
    assert errors["line-99"]["response"] is None


def test_batches_are_listed_and_answer_to_their_key_alone(kept, other):
    made = [start(kept, [line(0)]).id for _ in range(3)]
    assert [batch.id for batch in kept.batches.list(limit=2)][:3] == made[::-1]
    assert made[0] not in [batch.id for batch in other.batches.list()]
    for ask in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(made[0])


def test_the_file_that_a_batch_reads_cannot_be_deleted(kept):
    lines = [line(index, max_tokens=400, ignore_eos=True) for index in range(50)]
    made = start(kept, lines)
    with pytest.raises(openai.BadRequestError, match=made.id):
        kept.files.delete(made.input_file_id)
    kept.batches.cancel(made.id)
    ended(kept, made)
    assert kept.files.delete(made.input_file_id).deleted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": "15d"}, "at most 14 days"),
        ({"window": "soon"}, "completion_window"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"metadata": {str(index): "x" for index in range(17)}}, "metadata"),
    ],
)
def test_what_a_batch_cannot_have_is_refused(kept, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        start(kept, [line(0)], **fields)


def test_other_requests_go_before_the_lines_of_a_batch(tmp_path):
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        f"--state-dir={tmp_path}",
        "--max-num-seqs=2",
        "--max-running-batch-lines=2",
    )
    try:
        with server.openai() as client, server.http() as http:
            lines = [line(index, max_tokens=450, ignore_eos=True) for index in range(40)]
            made = start(client, lines)
            assert until(lambda: server.metric("num_requests_running") == 2)
            asked_at = time.monotonic()
            for _ in range(3):
                body = {"prompt": "Hello", "max_tokens": 2}
                assert http.post("/v1/completions", json=body).status_code == 200
            took_s = time.monotonic() - asked_at
            counts = client.batches.retrieve(made.id).request_counts
            assert counts.completed < counts.total, f"the batch ended within {took_s:.1f} s"
            batch = ended(client, made)
            assert (batch.status, batch.request_counts.completed) == ("completed", 40)
            assert len(lines_of(client, batch.output_file_id)) == 40
    finally:
        assert server.stop() == 0


def test_a_batch_goes_on_after_a_restart(tmp_path):
    arguments = (
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        f"--state-dir={tmp_path}",
    )
    server = LiveServer(*arguments)
    with server.openai() as client:
        lines = [line(index, max_tokens=300, ignore_eos=True) for index in range(60)]
        made = start(client, lines)
        assert until(lambda: client.batches.retrieve(made.id).request_counts.completed >= 3)
    assert server.stop() == 0
    server = LiveServer(*arguments)
    try:
        with server.openai() as client:
            assert client.batches.retrieve(made.id).request_counts.completed >= 3
            batch = ended(client, made)
            assert batch.status == "completed"
            assert len(lines_of(client, batch.output_file_id)) == 60
    finally:
        assert server.stop() == 0
