"""Requests of careless or hostile clients: wrong types, half a body, numbers too large."""

import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

PROMPT = {"prompt": "Hello", "max_tokens": 1}
TOO_LARGE = (2**31, 2**32, 2**63, 2**64, 10**30, -(10**30))


@pytest.fixture(scope="module")
def impatient():
    """A server that waits one second for a request, and keeps four jobs at most."""
    server = LiveServer(
        str(tiny_model_with_text()), "--request-timeout-s=1", "--max-jobs=4", "--threads=1"
    )
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize("media_type", ["text/plain", "multipart/form-data", "x"])
def test_a_body_of_another_media_type_is_refused(http, media_type):
    headers = {"Content-Type": media_type}
    answer = http.post("/v1/completions", content=json.dumps(PROMPT), headers=headers)
    assert answer.status_code == 415
    error = answer.json()["error"]
    assert error["type"] == "UnsupportedMediaTypeError" and "application/json" in error["message"]


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "application/ld+json"])
def test_json_by_any_name_is_taken(http, media_type):
    headers = {"Content-Type": media_type}
    answer = http.post("/v1/completions", content=json.dumps(PROMPT), headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("encoding", "status"), [("identity", 200), ("gzip", 415), ("br", 415)])
def test_a_compressed_body_is_refused_by_its_encoding(http, encoding, status):
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    answer = http.post("/v1/completions", content=json.dumps(PROMPT), headers=headers)
    assert answer.status_code == status, answer.text
    assert status == 200 or f"Content-Encoding: got '{encoding}'" in answer.text


@pytest.mark.parametrize(("site", "status"), [(None, 200), ("same-origin", 415)])
def test_a_browser_declares_what_it_sends(http, site, status):
    """Without a type any page could send a body to a server on its user's machine."""
    headers = {} if site is None else {"Sec-Fetch-Site": site}
    answer = http.post("/v1/completions", content=json.dumps(PROMPT), headers=headers)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"model": "tiny", "prompt": "Hi", "options": {"num_predict": 1}}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
    ],
)
@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 200), ({"Origin": "http://other.example"}, 403), ({"Origin": "SELF"}, 415)],
)
def test_curl_without_a_header_is_answered(server, http, headers, status, path, body):
    """`curl -d` declares a form; a page that sends one to the user's own server is refused."""
    headers = {name: value.replace("SELF", server.url) for name, value in headers.items()}
    headers["Content-Type"] = "application/x-www-form-urlencoded"
    answer = http.post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/models?limit=0", "limit: got '0', input should be greater than or equal to 1"),
        ("/v1/models?limit=x", "limit: got 'x', input should be a valid integer"),
    ],
)
def test_a_bad_parameter_is_named_and_nothing_of_the_inside_is_shown(http, path, said):
    answer = http.get(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "BadRequestError", "limit")
    assert error["message"].startswith(said) and ".py" not in error["message"]


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics", "/v1/models", "/v1/cache"])
def test_head_answers_as_get_without_a_body(http, path):
    head = http.head(path)
    assert head.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == http.get(path).headers["content-type"]


def test_head_of_what_has_no_get_is_refused(http):
    assert http.head("/v1/completions").status_code == 405


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("value", TOO_LARGE, ids=str)
@pytest.mark.parametrize(
    "field",
    ["max_tokens", "top_k", "seed", "n", "min_tokens", "priority", "logprobs", "best_of"],
)
def test_whole_numbers_that_fit_no_type_are_the_senders_fault(server, http, field, value):
    """The request is refused by the field's name, or served where the number makes sense."""
    answer = http.post("/v1/completions", json=PROMPT | {field: value})
    allowed = {200, 400} if abs(value) < 2**63 else {400}
    assert answer.status_code in allowed, answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == field, answer.text
    assert http.post("/v1/completions", json=PROMPT).status_code == 200


@pytest.mark.parametrize("value", TOO_LARGE, ids=str)
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "prompt"])
def test_token_ids_that_fit_no_type_are_the_senders_fault(http, field, value):
    answer = http.post("/v1/completions", json=PROMPT | {field: [value]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field)
    assert http.post("/v1/completions", json=PROMPT).status_code == 200


def test_a_model_in_a_folder_is_named_without_the_folder(impatient):
    path = str(tiny_model_with_text())
    with impatient.http() as http:
        (card,) = http.get("/v1/models").json()["data"]
        assert "/" not in card["id"] and card["id"] == path.rpartition("/")[2]
        assert path not in http.get("/v1/models").text and path not in http.get("/metrics").text
        for name in (card["id"], path, None):
            assert http.post("/v1/completions", json=PROMPT | {"model": name}).status_code == 200


def half_request(url: str, *, head_only: bool) -> socket.socket:
    host, port = re.fullmatch(r"http://([\d.]+):(\d+)", url).groups()
    connection = socket.create_connection((host, int(port)))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    rest = "" if head_only else 'Content-Length: 1000\r\n\r\n{"prompt": '
    connection.sendall((head + rest).encode())
    return connection


def answer_to(url: str, head: str, body: str = "") -> bytes:
    """Returns all bytes that a server sends for a request until it closes the connection."""
    host, port = re.fullmatch(r"http://([\d.]+):(\d+)", url).groups()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall((head.replace("\n", "\r\n") + "\r\n" + body).encode())
        return everything_from(connection)


def test_a_stream_for_a_client_of_http_1_0_has_no_chunks(server):
    """Chunks came with HTTP/1.1; before, an answer ended with its connection."""
    body = json.dumps(PROMPT | {"stream": True})
    head = f"POST /v1/completions HTTP/1.0\nContent-Length: {len(body)}\n"
    told, _, stream = answer_to(server.url, head, body).partition(b"\r\n\r\n")
    assert b" 200 " in told and b"transfer-encoding" not in told.lower()
    assert stream.startswith(b"data: {") and stream.endswith(b"data: [DONE]\n\n")
    whole = answer_to(server.url, "GET /version HTTP/1.0\n")
    assert b" 200 " in whole and whole.endswith(b'"}')


@pytest.mark.parametrize("hosts", ["", "Host: a\nHost: b\n"], ids=["none", "two"])
def test_a_request_names_one_host(impatient, hosts):
    answer = answer_to(impatient.url, f"GET /version HTTP/1.1\n{hosts}")
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(server):
    head = (
        "POST /v1/completions HTTP/1.1\nHost: x\nExpect: 100-continue\n"
        "Content-Type: application/json\nContent-Length: 99999999999\n"
    )
    answer = answer_to(server.url, head)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"the body is too large" in answer


def test_the_rest_of_a_body_that_was_refused_has_a_time_limit(impatient):
    """It was answered before its body came, most of which never does."""
    host, port = re.fullmatch(r"http://([\d.]+):(\d+)", impatient.url).groups()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + b"{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
        connection.sendall(b'"')
        everything_from(connection)


def everything_from(connection: socket.socket) -> bytes:
    """Reads until the server closes; raises TimeoutError where it does not within ten seconds."""
    connection.settimeout(10)
    parts = []
    while part := connection.recv(4096):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("head_only", [False, True], ids=["half a body", "half a head"])
def test_half_sent_requests_end(impatient, head_only):
    """Three hundred connections that send nothing more are closed, and others are served."""
    open_ones = [half_request(impatient.url, head_only=head_only) for _ in range(300)]
    with impatient.http() as http:
        assert http.post("/v1/completions", json=PROMPT).status_code == 200
    answers = [everything_from(connection) for connection in open_ones]
    wanted = b"" if head_only else b"HTTP/1.1 408 "
    assert all(answer[:13] == wanted for answer in answers)
    with impatient.http() as http:
        assert http.post("/v1/completions", json=PROMPT).status_code == 200


def test_a_request_that_comes_in_pieces_in_time_is_served(impatient):
    connection = half_request(impatient.url, head_only=False)
    rest = '"Hello", "max_tokens": 1, "user": "'
    rest += "x" * (1000 - len('{"prompt": ') - len(rest) - 2) + '"}'
    time.sleep(0.3)
    connection.sendall(rest.encode())
    connection.settimeout(10)
    head = connection.recv(4096)
    # The user is too long, so that it is ignored by name: it was read.
    assert b" 200 " in head.split(b"\r\n")[0] and b"user" in head


def test_never_more_jobs_than_allowed(impatient):
    """Jobs whose long prompts are tokenized at the same time do not share one free place; none ends
    while the engine is stopped.
    """
    long = {"prompt": "Hello " * 60, "max_tokens": 200, "ignore_eos": True}
    with impatient.http() as http, ThreadPoolExecutor(16) as pool:
        os.kill(impatient.core_pid, signal.SIGSTOP)
        try:
            answers = list(pool.map(lambda _: http.post("/generate", json=long), range(16)))
        finally:
            os.kill(impatient.core_pid, signal.SIGCONT)
        assert sorted(answer.status_code for answer in answers) == [202] * 4 + [429] * 12
        for answer in answers:
            if answer.status_code == 202:
                http.delete(f"/result/{answer.json()['request_id']}")
