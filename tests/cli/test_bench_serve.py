"""`octavo bench serve` over HTTP, against a live server and against one that misbehaves."""

import json
import re
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.etree import ElementTree

import pytest

from octavo.api.errors import ConfigError
from octavo.tools.bench import load, started_server
from octavo.tools.bench.serve_figures import Outcome, compute_metrics, parse_goodput
from octavo.tools.bench.stream_client import StreamedAnswer, StreamUsage
from octavo.tools.bench.traffic import TrafficRequest
from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

TRACE = [
    {"timestamp": 0, "input_length": 2048, "output_length": 320, "hash_ids": [1, 2, 3, 4]},
    {"timestamp": 400, "input_length": 2000, "output_length": 64, "hash_ids": [1, 2, 3, 5]},
    {"timestamp": 500, "input_length": 900, "output_length": 32},
]


@pytest.fixture(scope="module")
def url():
    server = LiveServer(str(tiny_model_with_text()), "--served-model-name=tiny", key="secret")
    yield server.url
    server.stop()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    return path


def test_a_trace(octavo, url, trace):
    ended = octavo(
        "bench",
        "serve",
        f"--trace={trace}",
        "--scale=1/32",
        f"--url={url}",
        "--json",
        "--goodput",
        "ttft:60000",
        "tpot:60000",
    )
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (
        found["completed"],
        found["failed"],
        found["prompt_tokens"],
        found["output_tokens"],
    ) == (3, 0, 64 + 63 + 29, 10 + 2 + 1)
    assert found["model"] == "tiny" and 0.5 <= found["elapsed_s"] < 30
    assert found["shared_share"] == pytest.approx(48 / 156)
    # Prompts of tests before this one may begin with the same token, which a hit then includes.
    assert 48 / 156 - 1e-9 <= found["prefix_hit_rate"] <= 51 / 156
    assert found["goodput"]["requests"] == 3 and found["goodput"]["share"] == 1
    for name in (
        "time_to_first_token_ms",
        "inter_token_ms",
        "time_per_output_token_ms",
        "request_latency_ms",
    ):
        assert 0 <= found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"], name
    assert 0 < found["time_to_first_token_ms"]["p50"] <= found["request_latency_ms"]["p50"]


def test_a_table_for_people(octavo, url):
    sizes = (
        "--num-requests=4",
        "--input-len=20",
        "--output-len=5",
        "--request-rate=50",
        "--max-concurrency=1",
        "--goodput=ttft:1e-3",
    )
    ended = octavo("bench", "serve", f"--url={url}", *sizes)
    assert ended.code == 0, ended.err
    # A first token that an earlier test's prompt had too may be found in the prefix cache.
    assert "completed                 4 in " in ended.out and re.search(
        r"^prefix hit rate +[0-9]\.\d%$", ended.out, re.MULTILINE
    )
    assert "goodput                   0.00 requests/s, 0.0% of all: ttft <= 0.001 ms" in ended.out


def test_mixed_lengths_in_bursts_and_a_picture(octavo, url, tmp_path):
    picture = tmp_path / "run.svg"
    traffic = ("--num-requests=12", "--input-len=8-64", "--output-len=2-12")
    bursts = ("--request-rate=40", "--burstiness=0.2", "--seed=3")
    arguments = ("bench", "serve", f"--url={url}", *traffic, *bursts)
    ended = octavo(*arguments, "--json", f"--plot={picture}", "--goodput=itl:60000")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["completed"], found["request_rate"], found["burstiness"]) == (12, 40, 0.2)
    assert 12 * 8 <= found["prompt_tokens"] <= 12 * 64
    assert 12 * 2 <= found["output_tokens"] <= 12 * 12
    assert found["goodput"]["requests"] == 12
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("}svg")
    ended = octavo(*arguments, "--plot=-")
    assert ended.code == 0, ended.err
    for title in ("time to first token", "time between tokens", "whole request"):
        assert f"\n{title}" in ended.out
    assert "\noutput tokens/s  " in ended.out and "█" in ended.out


def test_a_server_of_its_own(octavo, tiny):
    ended = octavo(
        "bench",
        "serve",
        *tiny,
        "--no-enable-prefix-caching",
        "--num-requests=3",
        "--input-len=9",
        "--output-len=4",
        "--json",
    )
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["completed"], found["output_tokens"], found["shared_share"]) == (3, 12, None)
    with socket.socket() as gone:
        assert gone.connect_ex(("127.0.0.1", int(found["url"].rpartition(":")[2]))) != 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scale=1/2"], "scale: requires --trace"),
        (["--request-rate=0"], "request_rate: got 0, expected a number above 0"),
        (["--request-rate=nan"], "request_rate: got nan, expected a number above 0"),
        (
            ["--goodput=ttlt:5"],
            (
                "goodput: got 'ttlt:5', expected NAME:MILLISECONDS of ttft, tpot, itl, e2el, such"
                " as ttft:500"
            ),
        ),
        (["--goodput=ttft"], "goodput: got 'ttft', expected NAME"),
        (["tpot:50"], "unexpected argument 'tpot:50'"),
        (
            ["--url=http://127.0.0.1:1", "--threads=1"],
            "threads: an engine option, but the server at --url is already running",
        ),
        (
            ["--url=ftp://localhost"],
            "url: got 'ftp://localhost', expected HOST:PORT, http://HOST:PORT or https://HOST",
        ),
        (["--url=http://127.0.0.1:1"], "url: no server responds at http://127.0.0.1:1: "),
        (["--trace=none.jsonl"], "trace: cannot read none.jsonl: No such file or directory"),
        (["--trace=none.jsonl", "--input-len=4"], "input_len: not supported with --trace"),
        (["--input-len=0"], "input_len: got '0', expected a number of tokens of at least 1"),
        (["--output-len=9-8"], "output_len: got '9-8', expected a number of tokens"),
        (["--burstiness=0.5"], "burstiness: requires --request-rate"),
        (
            ["--burstiness=0", "--request-rate=1"],
            "burstiness: got 0, expected a number from 0.01 to 100",
        ),
        (["--plot=run.png"], "plot: got 'run.png', expected an .svg file"),
        (["--plot=no-folder/run.svg"], "plot: got 'no-folder/run.svg', expected an .svg file"),
        (["--plot=-", "--json"], "plot: got -, not supported with --json"),
    ],
)
def test_bad_arguments(octavo, arguments, message):
    ended = octavo("bench", "serve", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.message[0].startswith(f"octavo: {message}")


def test_what_exceeds_the_context_is_named_before_anything_is_sent(octavo, url, trace):
    ended = octavo("bench", "serve", f"--trace={trace}", "--scale=1/4", f"--url={url}")
    assert ended.code == 2
    assert (
        ended.message[0]
        == f"octavo: {trace}, line 1: 512 + 80 tokens exceed the server's context of 512"
    )


def test_wrong_model_or_key(octavo, url, monkeypatch):
    ended = octavo("bench", "serve", f"--url={url}", "--model=huge")
    assert ended.code == 2 and ended.message[0] == f"octavo: model: got 'huge', {url} serves tiny"
    ended = octavo("bench", "serve", f"--url={url}", "--api-key=wrong")
    assert ended.code == 2 and "/v1/models returned HTTP 401: " in ended.message[0]


def test_an_own_server_that_does_not_start(octavo, tmp_path):
    ended = octavo("bench", "serve", f"--model={tmp_path}", "--num-requests=1")
    assert ended.code == 2 and "the server did not start (exit code 2)" in ended.message[-2]


STREAMS = {
    0: (
        b'data: {"choices": [{"text": "a"}]}\r\n\r\ndata: {"choices": [{"text": "b",'
        b' "finish_reason": "length"}]}\r\n\r\ndata: [DONE]\n\n'
    ),
    2: b'data: {"error": {"message": "broken"}}\n\n',
    3: b'data: {"choices": [{"text": "a"}]}\n\n',
}


def test_an_own_server_that_ends_fails_the_benchmark(octavo, tiny, monkeypatch):
    """The benchmark fails, since its figures would mean nothing."""
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    def run_load(_):
        started[0].kill()
        started[0].wait()
        return "tiny", [], 1.0

    monkeypatch.setattr(started_server.subprocess, "Popen", Noted)
    monkeypatch.setattr(load, "run_load", run_load)
    ended = octavo("bench", "serve", *tiny, "--num-requests=1")
    assert (ended.code, ended.out) == (1, "")
    assert (
        ended.message[-2]
        == "octavo: the server ended before the benchmark did (killed by signal 9)"
    )


class Misbehaving(BaseHTTPRequestHandler):
    """A server that answers the first request well, then in turns with 429, with an error within
    the stream, and with an end of the stream before the answer's.
    """

    protocol_version = "HTTP/1.1"
    count = 0

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(200, json.dumps({"data": [{"id": "odd"}]}).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        kind = Misbehaving.count % 4
        Misbehaving.count += 1
        if kind == 1:
            self.answer(429, b'{"error": {"message": "too many"}}')
        else:
            self.answer(200, STREAMS[kind])

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_failures_are_counted_and_named(octavo):
    """The server is of another make: no context, no usage, no token ids, other line ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Misbehaving)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = f"--url=http://127.0.0.1:{server.server_port}"
    ended = octavo(
        "bench",
        "serve",
        where,
        "--num-requests=4",
        "--max-concurrency=1",
        "--json",
        "--output-len=2",
    )
    found = json.loads(ended.out)
    assert ended.code == 0 and (found["completed"], found["failed"], found["output_tokens"]) == (
        1,
        3,
        2,
    )
    assert sorted(one["message"] for one in found["errors"]) == [
        "HTTP 429: too many",
        "broken",
        "the stream ended before the response was complete",
    ]
    assert (
        all(one["first"].startswith("request ") for one in found["errors"])
        and found["prefix_hit_rate"] is None
    )
    ended = octavo("bench", "serve", where, "--num-requests=1", "--output-len=2")
    server.shutdown()
    server.server_close()
    assert ended.code == 2 and "the first request failed: HTTP 429: too many" in ended.err


def streamed(times, usage=None):
    return StreamedAnswer(0.0, list(times), len(times), times[-1], usage, finished=True)


def test_figures_add_up():
    requests = [TrafficRequest(f"request {i}", 0.0, 10, 3) for i in range(3)]
    outcomes = [
        Outcome(requests[0], 0.001, streamed([0.1, 0.2, 0.3], StreamUsage(10, 3))),
        Outcome(requests[1], 0.002, streamed([0.6], StreamUsage(10, 1))),
        Outcome(requests[2], 0.003, error="no"),
    ]
    found = compute_metrics(outcomes, 2.0, parse_goodput(["ttft:500 tpot:100.1", "e2el:1000"]))
    assert (
        found["completed"],
        found["failed"],
        found["output_tokens_per_s"],
        found["prompt_tokens_per_s"],
    ) == (2, 1, 2.0, 10.0)
    assert found["inter_token_ms"]["p99"] == pytest.approx(100) and found[
        "time_per_output_token_ms"
    ]["p50"] == pytest.approx(100)
    assert found["goodput"] == {
        "limits_ms": {"ttft": 500, "tpot": 100.1, "e2el": 1000},
        "requests": 1,
        "requests_per_s": 0.5,
        "share": pytest.approx(1 / 3),
    }
    assert found["errors"] == [{"message": "no", "count": 1, "first": "request 2"}]
    with pytest.raises(ConfigError):
        parse_goodput(["ttft:-5"])


def test_an_answer_is_good_by_its_longest_gap():
    request = TrafficRequest("request 1", 0.0, 10, 4)
    outcomes = [
        Outcome(request, 0.0, streamed([0.1, 0.2, 0.5])),
        Outcome(request, 0.0, streamed([0.1, 0.2, 0.3])),
        Outcome(request, 0.0, streamed([0.1])),
    ]
    good = compute_metrics(outcomes, 1.0, parse_goodput(["itl:150"]))["goodput"]
    assert good["requests"] == 2, "an answer of one token has no gap that is too long"
