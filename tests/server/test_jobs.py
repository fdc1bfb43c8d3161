"""POST /generate and GET /result/ID."""

import pytest

from tests.server.conftest import OTHER_KEY
from tests.support.live_server import LETTERS, LONG, until

SHORT = {
    "prompt": "Hello",
    "max_tokens": 6,
    "seed": 1,
    "allowed_token_ids": LETTERS,
    "ignore_eos": True,
}


def start(http, **body):
    response = http.post("/generate", json=SHORT | body)
    assert response.status_code == 202, response.text
    return response.json()["request_id"]


def result(http, request_id):
    return http.get(f"/result/{request_id}").json()


def test_a_job_is_answered_later(http):
    request_id = start(http, n=2)
    assert until(lambda: result(http, request_id)["state"] == "finished")
    report = result(http, request_id)
    whole = http.post("/v1/completions", json=SHORT | {"n": 2}).json()
    assert [output["text"] for output in report["outputs"]] == [
        choice["text"] for choice in whole["choices"]
    ]
    assert [output["finish_reason"] for output in report["outputs"]] == ["length", "length"]
    assert report["usage"] == {"prompt_tokens": 5, "completion_tokens": 12}
    assert result(http, request_id) == report


def test_a_job_says_where_its_time_went(http):
    request_id = start(http, timings=True)
    assert until(lambda: result(http, request_id)["state"] == "finished")
    timings = result(http, request_id)["timings"]
    assert (
        timings["num_steps"] == 6
        and timings["prefill_s"] > 0
        and isinstance(timings["reason"], str)
    )


@pytest.mark.alone
def test_a_running_job_shows_what_there_is_and_can_be_forgotten(server, http):
    request_id = start(http, **LONG)
    assert result(http, request_id)["state"] in ("waiting", "running")
    assert until(lambda: result(http, request_id).get("outputs"))
    assert result(http, request_id)["outputs"][0]["finish_reason"] is None
    assert http.delete(f"/result/{request_id}").json() == {
        "request_id": request_id,
        "state": "forgotten",
    }
    assert until(lambda: server.metric("num_requests_running") == 0, seconds=1)
    assert http.get(f"/result/{request_id}").status_code == 404


def test_token_ids_and_a_name(http):
    assert start(http, prompt=[5, 6, 7], request_id="my job") == "my job"
    assert until(lambda: result(http, "my job")["state"] == "finished")


def test_a_job_answers_to_its_key_alone(keeper):
    with keeper.http() as own, keeper.http() as other:
        other.headers["Authorization"] = f"Bearer {OTHER_KEY}"
        name = start(own, request_id="mine")
        assert other.get(f"/result/{name}").status_code == 404
        assert other.delete(f"/result/{name}").status_code == 404
        assert until(lambda: result(own, name)["state"] == "finished")
        assert own.delete(f"/result/{name}").status_code == 200


def test_an_unknown_job(http):
    error = http.get("/result/none").json()["error"]
    assert (error["code"], error["type"]) == (404, "NotFoundError")
    assert error["message"] == "no job 'none': unknown, or finished more than 600 seconds ago"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True}, "stream"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"model": "x"}, "model"),
    ],
)
def test_what_a_job_cannot_do(http, body, param):
    response = http.post("/generate", json=SHORT | body)
    assert (
        response.status_code == (404 if param == "model" else 400)
        and response.json()["error"]["param"] == param
    )
