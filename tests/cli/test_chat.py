"""`octavo chat`, driven through its standard input."""

import io
import signal
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


def test_the_history_goes_along_until_reset(talk):
    (first,) = expected([[user("one")]])
    second, alone = expected([[user("one"), assistant(first), user("two")], [user("two")]])
    out, _ = talk("one", "two", "/reset", "two", "/exit", "never read")
    assert out == f"{first}\n{second}\n{alone}\n".splitlines()


def test_an_unknown_command_is_named(talk):
    out, messages = talk("/rest")
    assert out == []
    assert "no such command: /rest (/reset starts over" in messages[1]


def test_a_question_that_does_not_fit_is_taken_back(talk):
    (answer,) = expected([[user("one")]])
    out, messages = talk("x" * 300, "one")
    assert out == answer.splitlines()
    assert any("maximum context length is 256" in line for line in messages)
    assert "hint: /reset starts over" in messages


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
