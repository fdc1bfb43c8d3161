"""`octavo top` and `octavo chat --url`, against a live server."""

import io
import sys
import threading

import pytest

from octavo.cli.top_reading import Reading, parse_metrics
from octavo.cli.top_view import render_view
from tests.support.live_server import LiveServer
from tests.support.terminal import Terminal
from tests.support.tiny_tokenizer import tiny_model_with_text

KEY = "operator"


@pytest.fixture(scope="module")
def server():
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        "--api-key=third",
        f"--operator-key={KEY}",
        key="other",
    )
    yield server
    assert server.stop() == 0


@pytest.fixture
def busy(server):
    """Keeps a request running on the server."""
    with server.openai() as client:
        stream = client.completions.create(
            model="tiny", prompt="on", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        done = threading.Event()

        def again():
            while not done.is_set():
                client.completions.create(
                    model="tiny", prompt="on", max_tokens=400, extra_body={"ignore_eos": True}
                )

        thread = threading.Thread(target=again)
        thread.start()
        yield
        done.set()
        thread.join()
        stream.close()


@pytest.fixture
def top(octavo, server, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str, key: str = KEY):
        return octavo(
            "top", f"--url={server.url}", f"--api-key={key}", "--interval=0.2", *arguments
        )

    return run


def test_one_view_shows_models_and_requests(top, busy):
    views = [top("--once") for _ in range(3)]
    assert all(view.code == 0 and "tiny" in view.out and "ready" in view.out for view in views)
    assert any("cmpl-" in view.out for view in views)


def test_a_view_without_requests_says_so(top):
    assert "no running or waiting requests" in top().out


def test_a_key_that_is_not_the_operators_sees_no_others_requests(top, busy):
    ended = top(key="third")
    assert ended.code == 0 and "cmpl-" not in ended.out


def test_errors_are_a_sentence(top, octavo):
    refused = top(key="wrong")
    assert refused.code == 2
    assert "/metrics returned HTTP 401: a valid API key is required" in refused.message[0]
    gone = octavo("top", "--url=http://127.0.0.1:9")
    assert gone.code != 0
    assert "no server responds at http://127.0.0.1:9: Connection refused" in gone.message[0]


def test_the_live_view_goes_on_until_ctrl_c(server):
    terminal = Terminal("top", f"--url={server.url}", f"--api-key={KEY}", "--interval=0.1")
    for _ in range(3):
        terminal.until("gen tok/s")
        terminal.until("tiny")
    terminal.press("\x03")
    assert terminal.close() == 0


def test_rates_are_those_between_two_readings():
    from rich.console import Console

    def reading(time_s, tokens):
        values = {"generation_tokens_total": tokens, "kv_cache_usage_perc": 0.5}
        values |= {"spec_decode_num_draft_tokens_total": 1200}
        values |= {"spec_decode_num_accepted_tokens_total": 900}
        return Reading(time_s, "url", {"m": values}, {"m": "ready", "n": "loading"})

    console = Console(width=160, file=io.StringIO())
    console.print(render_view(reading(1.0, 100), reading(3.0, 350)))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    rows = {words[0]: words for words in lines if words}
    drafts = ["1,200", "75%"]
    assert rows["m"] == ["m", "ready", "-", "-", "-", "50%", "-", "-", "125.0", "-", *drafts]
    assert rows["n"] == ["n", "loading", *["-"] * 10]


def test_a_narrow_view_has_whole_ids():
    """An id is told whole, for it is what a request is aborted by."""
    from rich.console import Console

    name = "chatcmpl-0123456789abcdef01234567"
    request = {"id": name, "model": "m", "state": "running", "age_s": 1, "waited_s": 0}
    request |= {"prompt_tokens": 5, "tokens": 6, "choices": [{"blocks": 2}]}
    now = Reading(1.0, "url", {}, {}, [request])
    console = Console(width=70, file=io.StringIO())
    console.print(render_view(now, now))
    lines = console.file.getvalue().splitlines()
    assert name in "".join(line.split(" ")[0] for line in lines)


@pytest.mark.parametrize("width", [40, 50, 60, 80])
def test_a_narrow_view_names_the_model_and_leaves_columns_out(width):
    from rich.console import Console

    values = {"generation_tokens_total": 5.0, "kv_cache_usage_perc": 0.5, "num_requests_running": 3}
    now = Reading(1.0, "url", {"smollm2": values}, {"smollm2": "ready"})
    console = Console(width=width, file=io.StringIO())
    console.print(render_view(now, now))
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert lines[1].split()[:3] == ["model", "state", "running"] and "gen tok/s" in lines[1]
    assert lines[2].split()[:3] == ["smollm2", "ready", "3"]
    assert ("prefix hits" in lines[1]) == (width >= 80)


def test_shares_of_several_engines_are_no_sum():
    text = (
        "# TYPE octavo:kv_cache_usage_perc gauge\n"
        'octavo:kv_cache_usage_perc{model_name="a",engine="0"} 0.75\n'
        'octavo:kv_cache_usage_perc{model_name="a",engine="1"} 0.25\n'
    )
    assert parse_metrics(text) == {"a": {"kv_cache_usage_perc": 0.5}}


def test_series_of_other_servers_are_left_out():
    text = (
        "# TYPE octavo:kv_blocks_held gauge\n"
        'octavo:kv_blocks_held{model_name="a",engine="0"} 3.0\n'
        "# TYPE vllm:kv_blocks_held gauge\n"
        'vllm:kv_blocks_held{model_name="a",engine="0"} 3.0\n'
    )
    assert parse_metrics(text) == {"a": {"kv_blocks_held": 3.0}}


def test_a_conversation_with_a_server_is_that_with_its_model(octavo, server, tiny, monkeypatch):
    answers = []
    named = [f"--url={server.url}", f"--api-key={KEY}", "tiny"]
    for flags in (named, tiny):
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
        ended = octavo("chat", "--max-tokens=6", "--temperature=0", *flags)
        assert ended.code == 0 and "+ 6 completion tokens" in ended.err
        answers.append(ended.out)
    assert answers[0] == answers[1]
