"""`octavo chat`, driven through its standard input."""

import io
import json
import signal
import stat
import sys

import pytest

from octavo import LLM, SamplingParams
from tests.cli.conftest import SMALL, process
from tests.support.tiny_tokenizer import tiny_model_with_text


@pytest.fixture
def talk(octavo, tiny, monkeypatch):
    """Talks in the given lines; returns the lines of stdout, and the messages on stderr."""

    def run(*lines: str, **options: str):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        flags = [f"--{name}={value}" for name, value in {"max-tokens": "6", **options}.items()]
        ended = octavo("chat", *tiny, *flags)
        assert ended.code == 0
        return ended.out.splitlines(), ended.message

    return run


def expected(conversations) -> list[str]:
    options = {flag[2:].split("=")[0].replace("-", "_"): flag.split("=")[1] for flag in SMALL}
    with LLM(str(tiny_model_with_text()), report=lambda _: None, **options) as llm:
        outputs = llm.chat(
            conversations, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False
        )
        return [output.outputs[0].text for output in outputs]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def lines_of(*answers: str) -> list[str]:
    return "".join(f"{answer}\n" for answer in answers).splitlines()


def test_the_history_goes_along_until_reset(talk):
    (first,) = expected([[user("one")]])
    second, alone = expected([[user("one"), assistant(first), user("two")], [user("two")]])
    out, _ = talk("one", "two", "/reset", "two", "/exit", "never read")
    assert out == lines_of(first, second, alone)


def test_undo_and_retry_go_back_one_question(talk):
    first, other = expected([[user("one")], [user("two")]])
    out, messages = talk("/undo", "one", "/retry", "/undo", "two")
    assert out == lines_of(first, first, other)
    assert "no question has been asked yet" in messages and "removed: one" in messages


def test_a_message_of_several_lines_is_one_message(talk):
    quoted, joined = expected([[user("a\n/b")], [user("c\nd")]])
    out, _ = talk('"""a', '/b"""', "/reset", "c\\", "d")
    assert out == lines_of(quoted, joined)


def test_the_system_message_can_be_set_and_removed(talk):
    (answer, alone) = expected([[system("Be short."), user("one")], [user("one")]])
    out, messages = talk("/system Be short.", "one", "/system -", "/reset", "one")
    assert out == lines_of(answer, alone)
    assert "system message: Be short." in messages and "no system message" in messages


def test_sampling_values_are_checked_when_set(talk):
    out, messages = talk(
        "/set temperature 9", "/set temprature 1", "/set top_k no", "/set max_tokens 2", "/set"
    )
    assert out == []
    said = "\n".join(messages)
    assert "temperature: got 9, expected a number from 0 to 2" in said
    assert "unknown parameter 'temprature'\nhint: did you mean temperature?" in said
    assert "top_k: got 'no'" in said
    assert messages[-2] == "max_tokens 2"


def test_a_set_value_is_used(talk):
    _, messages = talk("/set max_tokens 2", "one")
    assert any("+ 2 completion tokens" in line for line in messages)


def test_the_default_limit_of_an_answer_is_named(octavo, tiny, monkeypatch):
    monkeypatch.setattr("octavo.cli.common.answers.DEFAULT_MAX_TOKENS", 7)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    ended = octavo("chat", *tiny)
    assert "truncated after 7 tokens, the default of max_tokens; use /set max_tokens N" in ended.err


def test_a_saved_conversation_goes_on_where_it_was(talk, tmp_path):
    file = tmp_path / "chat.json"
    (first,) = expected([[system("Be short."), user("one")]])
    (second,) = expected(
        [[system("Be short."), user("one"), assistant(first), user("two")]],
    )
    out, _ = talk("/system Be short.", "one", f"/save {file}", f"/save {file}")
    assert out == lines_of(first)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    out, _ = talk(f"/load {file}", "two")
    assert out == lines_of(second)


def test_a_file_that_is_no_conversation_is_refused_and_not_replaced(talk, tmp_path):
    file = tmp_path / "notes.json"
    file.write_text(json.dumps({"messages": [user("one")]}))
    before = file.read_bytes()
    _, messages = talk(f"/load {file}", f"/save {file}", f"/load {tmp_path / 'none'}", "/save")
    assert messages[1:-1] == [
        f"{file}: not a conversation: user and assistant messages must alternate",
        "hint: use a file written by /save",
        f"{file}: not a conversation: user and assistant messages must alternate",
        "hint: use a file written by /save",
        f"chat: {tmp_path / 'none'}: cannot be read: No such file or directory",
        "hint: check the path and its permissions",
        "/save: a file name is required",
        "hint: /save chat.json",
    ]
    assert file.read_bytes() == before


def test_an_unknown_command_is_named(talk):
    out, messages = talk("/rest")
    assert out == []
    assert messages[1:3] == ["no such command: /rest", "hint: did you mean /reset?"]


def test_a_question_that_does_not_fit_is_taken_back(talk):
    (answer,) = expected([[user("one")]])
    out, messages = talk("x" * 300, "one")
    assert [line for line in out if line] == lines_of(answer)
    assert any("maximum context length is 256" in line for line in messages)
    assert "hint: /reset starts over" in messages


def test_options_of_an_engine_are_refused_with_a_url(octavo):
    ended = octavo("chat", "--url=http://127.0.0.1:9", "--threads=1")
    assert (
        ended.code == 2
        and "--threads: not supported with --url; the server has its own" in ended.err
    )
    ended = octavo("chat", "--url=http://127.0.0.1:9")
    assert "no server responds at http://127.0.0.1:9: Connection refused" in ended.err
    assert octavo("chat", "--url=ftp://x").message[0].endswith("http://HOST:PORT or https://HOST")
    assert "api_key: requires --url" in octavo("chat", "--api-key=x").err
    twice = octavo("chat", "one", "--model=other")
    assert "model: got 'one' and --model other, expected one" in twice.message[0]


def test_ctrl_c_stops_the_answer_and_not_the_conversation():
    running = process("chat", f"--model={tiny_model_with_text()}", *SMALL, "--backend=reference")
    running.stdin.write("hello\n")
    running.stdin.flush()
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    running.stdin.write("/exit\n")
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0
    assert "Traceback" not in err
