"""A user's mistake gets one clear message, exit code 2 and no traceback."""

import json
import shutil
import socket

import pytest

from tests.support.tiny_tokenizer import tiny_model_with_text


@pytest.fixture
def model_copy(tmp_path):
    """A copy of the tiny model, which a test may damage."""
    return shutil.copytree(tiny_model_with_text(), tmp_path / "model")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "hi", "--treads=3"],
            [
                "octavo: No such option: --treads",
                "hint: did you mean --threads?",
            ],
        ),
        (
            ["run", "hi", "--checks"],
            [
                "octavo: No such option: --checks",
                "hint: octavo run --help lists the options",
            ],
        ),
        (
            ["rum", "hi"],
            [
                "octavo: No such command 'rum'. Did you mean 'rm', 'run'?",
                "hint: octavo --help lists the options",
            ],
        ),
        (
            ["quantize"],
            [
                "octavo: Missing argument 'model'.",
                "hint: octavo quantize --help lists the options",
            ],
        ),
        (
            ["run", "hi", "--threads=many"],
            ["octavo: threads: got 'many', expected an integer of at least 1"],
        ),
        (
            ["run", "hi", "--seed=abc"],
            ["octavo: seed: got 'abc', expected an integer"],
        ),
        (
            ["run", "hi", "--temperature", "hot"],
            ["octavo: temperature: got 'hot', expected a number"],
        ),
        (
            ["top", "--interval=0"],
            ["octavo: interval: got '0', expected at least 0.1"],
        ),
        (
            ["run", "hi", "--backend=gpu"],
            ["octavo: backend: got 'gpu', expected 'native' or 'torch' or 'reference'"],
        ),
        (
            ["run", "hi", "--temperature=-1"],
            ["octavo: temperature: got -1.0, expected a number from 0 to 2", "hint: 0 is greedy"],
        ),
        (
            ["run", "hi", "--top-p=1.5"],
            ["octavo: top_p: got 1.5, expected a number above 0 and at most 1"],
        ),
        (
            ["run", " \n"],
            [
                "octavo: prompt: got an empty text",
                "hint: for example: octavo run 'What is a prompt?'",
            ],
        ),
        (
            ["run", "--raw", ""],
            [
                "octavo: prompt: got an empty text",
                "hint: for example: octavo run 'What is a prompt?'",
            ],
        ),
        (
            ["run", "hi", "--raw", "--system=x"],
            [
                "octavo: --system: not supported with --raw",
                "hint: remove --raw or --system",
            ],
        ),
        (["serve", "--port=99999"], ["octavo: port: got 99999, expected 0 to 65535"]),
        (
            ["serve", "--api-key= "],
            [
                "octavo: api_key: got an empty key",
                "hint: remove the option to serve without keys",
            ],
        ),
        (["bench"], ["octavo: Missing command.", "hint: octavo bench --help lists the options"]),
        (
            ["run", "hi", "--tokenizer=" + "x" * 300],
            [f"octavo: tokenizer: got {'x' * 300!r}, no such file or directory"],
        ),
        (["pull", ""], ["octavo: model '': no such file or directory"]),
        (["pull", "~nobody/x.gguf"], ["octavo: model '~nobody/x.gguf': no such file or directory"]),
        (
            ["pull", "x" * 300 + ".gguf"],
            [f"octavo: model {'x' * 300 + '.gguf'!r}: no such file or directory"],
        ),
        (["pull", "./no/such.gguf"], ["octavo: model './no/such.gguf': no such file or directory"]),
    ],
)
def test_bad_arguments(octavo, arguments, message):
    ended = octavo(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.message[: len(message)] == message


def refusal(octavo, *arguments) -> str:
    """Returns the message of a command that must fail as the caller's fault."""
    ended = octavo(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.message[0].startswith("octavo: ")
    return "\n".join(ended.message)


def test_a_prompt_longer_than_the_context(octavo, tiny):
    said = refusal(octavo, "run", "--raw", "x" * 400, *tiny)
    assert said == (
        "octavo: This model's maximum context length is 256 tokens, the prompt has 400; expected"
        " at most 255"
    )


def test_too_little_memory(octavo, tiny):
    assert "kv_cache_memory_bytes: got 10.0 KiB, expected" in refusal(
        octavo, "run", "hi", *tiny, "--kv-cache-memory-bytes=10KiB"
    )


def test_a_truncated_model_file(octavo, model_copy):
    weights = model_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refusal(octavo, "run", "hi", f"--model={model_copy}")


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"no model at all"]
)
def test_a_corrupt_gguf_file(octavo, tmp_path, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert "bad.gguf" in refusal(octavo, "run", "hi", f"--model={path}")


def test_a_config_that_is_no_json(octavo, model_copy):
    (model_copy / "config.json").write_text("{")
    assert "config.json" in refusal(octavo, "run", "hi", f"--model={model_copy}")


def test_a_family_that_is_not_known(octavo, model_copy):
    config = json.loads((model_copy / "config.json").read_text())
    (model_copy / "config.json").write_text(json.dumps({**config, "model_type": "martian"}))
    said = refusal(octavo, "run", "hi", f"--model={model_copy}")
    assert "martian" in said and "llama" in said


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('users must not shout') }}", "users must not shout"),
        ("{% for", "template"),
        ("{{ messages[7].content }}", ""),
    ],
)
def test_a_template_that_fails(octavo, tiny, template, reason):
    said = refusal(octavo, "run", "hi", *tiny, f"--chat-template={template}")
    assert "messages: the chat template failed: " in said and reason in said


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_template_that_cannot_be_read(octavo, tiny, tmp_path, content):
    path = tmp_path / ("long" * 100 if content is None else "latin.jinja")
    if content is not None:
        path.write_bytes(content)
    assert "chat_template: " in refusal(octavo, "run", "hi", *tiny, f"--chat-template={path}")


def test_special_token_text_in_a_message_stays_text(octavo, tiny):
    def num_tokens(text: str) -> int:
        return json.loads(octavo("run", text, *tiny, "--max-tokens=1", "--json").out)[
            "prompt_tokens"
        ]

    assert num_tokens("<eos>") == num_tokens("12345")


def test_a_full_port_is_known_before_a_model_is_loaded(octavo):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal(octavo, "serve", "no/such-model-is-even-looked-for", f"--port={port}")
    assert said == (
        f"octavo: cannot listen on 127.0.0.1:{port}: Address already in use\n"
        "hint: set another --port or --host"
    )


def test_an_address_that_is_not_ours(octavo):
    assert "cannot listen on 203.0.113.1:" in refusal(octavo, "serve", "--host=203.0.113.1")
