"""`octavo run` prints one answer on stdout and statistics on stderr."""

import io
import json
import subprocess
import sys

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.common.answers import DEFAULT_MAX_TOKENS, sampling_for
from octavo.cli.common.model import split_words
from octavo.frontend.sampling_defaults import SamplingDefaults
from tests.cli.conftest import SMALL, process, run_counting_imports
from tests.support.tiny_encoders import save_classifier
from tests.support.tiny_tokenizer import tiny_model_with_text


def answer_of(prompt, **params) -> str:
    options = {flag[2:].split("=")[0].replace("-", "_"): flag.split("=")[1] for flag in SMALL}
    with LLM(str(tiny_model_with_text()), report=lambda _: None, **options) as llm:
        prompt = prompt if isinstance(prompt, str) else llm.chat_prompt(prompt)
        return (
            llm.generate(prompt, SamplingParams(temperature=0, **params), use_tqdm=False)[0]
            .outputs[0]
            .text
        )


def test_the_answer_goes_to_stdout_and_the_rest_to_stderr(octavo, tiny):
    ended = octavo("run", "hello", *tiny, "--max-tokens=12")
    assert ended.code == 0
    assert ended.out == answer_of([{"role": "user", "content": "hello"}], max_tokens=12) + "\n"
    assert (
        "12 completion tokens" in ended.message[-1]
        and "tok/s" in ended.message[-1]
        and "first token " in ended.message[-1]
    )


NOT_NEEDED = {
    *(
        "pydantic",
        "rich",
        "zmq",
        "fastapi",
        "uvicorn",
        "huggingface_hub",
        "torch",
        "transformers",
        "multiprocessing",
    ),
    *(
        "octavo.server",
        "octavo.cli.bench",
        "octavo.cli.serve",
        "octavo.executor.reference.backend",
        "octavo.worker.calibration",
    ),
}


def test_it_imports_nothing_that_it_does_not_need(tiny):
    command = [sys.executable, "-X", "importtime", "-m", "octavo.cli.main", "run", "hello", *tiny]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {
        line.rpartition("|")[2].strip()
        for line in ended.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "octavo.api.llm" in imported and not NOT_NEEDED & imported


def test_a_system_message_comes_first(octavo, tiny):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert (
        octavo("run", "hello", *tiny, "--system=be brief", "--max-tokens=8").out
        == answer_of(messages, max_tokens=8) + "\n"
    )


def test_raw_leaves_the_template_out(octavo, tiny):
    assert (
        octavo("run", "--raw", "hello", *tiny, "--max-tokens=8").out
        == answer_of("hello", max_tokens=8) + "\n"
    )


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_dash_reads_the_prompt_from_stdin(octavo, tiny, monkeypatch, end):
    """The newline that ends the last line, as `echo` writes it, is no part of the prompt."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello" + end))
    assert (
        octavo("run", "--raw", "-", *tiny, "--max-tokens=8").out
        == answer_of("hello", max_tokens=8) + "\n"
    )


def test_a_stop_string_ends_the_answer(octavo, tiny):
    whole = answer_of("hello", max_tokens=8)
    words = ("run", "--raw", "hello", *tiny, "--max-tokens=8", "--stop", "never", "--stop")
    assert octavo(*words, whole[3:5]).out == whole[: whole.find(whole[3:5])] + "\n"
    assert "stop: " in octavo(*words, "").err


def test_json_is_one_object(octavo, tiny):
    ended = octavo("run", "--raw", "hello", *tiny, "--max-tokens=8", "--json")
    report = json.loads(ended.out)
    assert report["text"] == answer_of("hello", max_tokens=8)
    assert (report["prompt_tokens"], report["completion_tokens"], report["finish_reason"]) == (
        5,
        8,
        "length",
    )
    assert 0 < report["time_to_first_token_s"] <= report["total_s"]
    assert report["tokens_per_second"] > 0


def test_without_max_tokens_the_context_is_the_end(octavo, tiny):
    report = json.loads(octavo("run", "--raw", "hello", *tiny, "--json").out)
    assert report["finish_reason"] == "stop" or report["completion_tokens"] == 256 - 5


def test_an_answer_without_a_limit_has_a_default_cap_that_is_named(octavo, tiny, monkeypatch):
    monkeypatch.setattr("octavo.cli.common.answers.DEFAULT_MAX_TOKENS", 7)
    said = (
        "the response was truncated after 7 tokens, the default of --max-tokens; use a larger value"
    )
    ended = octavo("run", "--raw", "hello", *tiny)
    assert "7 completion tokens" in ended.message[0] and ended.message[-1].startswith(said)
    ended = octavo("run", "--raw", "hello", *tiny, "--max-tokens=7")
    assert "7 completion tokens" in ended.message[-1], "a limit that was given needs no explanation"


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_model_without_answers_is_refused_before_anything_is_asked(
    octavo, command, monkeypatch, tmp_path
):
    save_classifier(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    ended = octavo(command, f"--model={tmp_path}", "--threads=1")
    assert ended.code == 2 and "and does not generate text" in ended.message[0], ended.err


def test_a_seed_repeats_the_draws(octavo, tiny):
    texts = [
        octavo("run", "hello", *tiny, "--max-tokens=12", "--temperature=1", f"--seed={seed}").out
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_each_answer_without_a_seed_has_one_of_its_own_which_repeats_it(octavo, tiny):
    sampled = ("run", "hello", *tiny, "--max-tokens=12", "--temperature=1", "--json")
    first, second = (json.loads(octavo(*sampled).out) for _ in range(2))
    assert first["seed"] != second["seed"] and first["text"] != second["text"]
    again = json.loads(octavo(*sampled, f"--seed={first['seed']}").out)
    assert (again["seed"], again["text"]) == (first["seed"], first["text"])
    greedy = json.loads(octavo("run", "hello", *tiny, "--max-tokens=2", "--json").out)
    assert greedy["seed"] is None


def test_a_line_tells_the_sampling_params_that_flags_change(octavo, tiny):
    def told(*flags):
        lines = octavo("run", "hello", *tiny, *flags).err.splitlines()
        return [line for line in lines if line.startswith("sampling params: ")]

    flags = ("--temperature=1.5", "--top-p=0.9", "--max-tokens=3", "--seed=7")
    assert told(*flags) == ["sampling params: temperature 1.5, top_p 0.9, max_tokens 3, seed 7"]
    assert told("--max-tokens=3") == ["sampling params: temperature 0, max_tokens 3"]
    assert told("--max-model-len=64") == []


def test_the_least_top_p_is_greedy(octavo, tiny):
    greedy = octavo("run", "hello", *tiny, "--max-tokens=12").out
    assert (
        octavo("run", "hello", *tiny, "--max-tokens=12", "--temperature=1", "--top-p=0.000001").out
        == greedy
    )


@pytest.mark.parametrize(
    ("recommended", "given", "expected"),
    [
        ({}, {}, (1.0, 1.0, DEFAULT_MAX_TOKENS)),
        ({"temperature": 0.6, "max_tokens": 50}, {}, (0.6, 1.0, 50)),
        ({"temperature": 0.6, "repetition_penalty": 1.1}, {"temperature": 0}, (0, 1.1, 1024)),
        ({"max_tokens": 50}, {"max_tokens": 9}, (1.0, 1.0, 9)),
    ],
)
def test_what_is_given_goes_over_what_is_recommended(recommended, given, expected):
    class Model:
        def get_default_chat_params(self):
            return SamplingDefaults(recommended).chat_params

    params = sampling_for(Model(), {"temperature": None, "max_tokens": None, "seed": None} | given)
    assert (params.temperature, params.repetition_penalty, params.max_tokens) == expected


@pytest.mark.parametrize(
    ("words", "model", "expected"),
    [
        ((), None, (None, None)),
        (("hello",), None, (None, "hello")),
        (("smollm2",), None, ("smollm2", None)),
        (("smollm2:latest",), None, ("smollm2:latest", None)),
        (("smollm2", "hello"), None, ("smollm2", "hello")),
        (("smollm2", "why", "so?"), None, ("smollm2", "why so?")),
        (("./x.gguf", "hello"), None, ("./x.gguf", "hello")),
        (("./x.gguf",), None, ("./x.gguf", None)),
        (("owner/repo",), None, ("owner/repo", None)),
        (("hf.co/owner/repo:Q4_K_M", "hi"), None, ("hf.co/owner/repo:Q4_K_M", "hi")),
        (("What is a/b?",), None, (None, "What is a/b?")),
        (("smollm2",), "tiny", ("tiny", "smollm2")),
        (("hello", "there"), "tiny", ("tiny", "hello there")),
        (("",), None, (None, "")),
        (("-",), None, (None, "-")),
        (("Summarize x.gguf",), None, (None, "Summarize x.gguf")),
    ],
)
def test_the_first_word_may_name_the_model(words, model, expected):
    assert split_words(words, model) == expected


def test_a_model_alone_reads_the_prompt_from_stdin(octavo, tiny, monkeypatch):
    model, *options = tiny
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    ended = octavo("run", model.removeprefix("--model="), *options, "--raw", "--max-tokens=8")
    assert ended.out == answer_of("hello", max_tokens=8) + "\n"


def test_two_words_without_a_model_say_how_to_quote(octavo):
    ended = octavo("run", "hello", "there")
    assert ended.code == 2 and "model 'hello'" in ended.message[0]


def test_a_repetition_ends_the_answer_with_a_message(octavo, tiny):
    """The bias leaves the tiny model one token, which it repeats."""
    override = '--override-generation-config={"temperature": 0, "repetition_penalty": 0.01}'
    command = ["run", "--raw", "hello", *tiny, override, "--max-tokens=200"]
    ended = octavo(*command)
    assert "the response was stopped because it repeats itself" in ended.message[-1]
    assert "200 completion tokens" not in ended.err
    assert "200 completion tokens" in octavo(*command, "--no-repetition-detection").err


@pytest.mark.model
def test_the_default_model_knows_paris_and_begins_with_few_imports():
    text, num_modules = run_counting_imports("run", "Name the capital of France.")
    assert "Paris" in text
    assert num_modules < 900


@pytest.mark.model
def test_the_default_model_answers_a_question_that_echo_pipes():
    asked = process("run", "smollm2")
    out, err = asked.communicate("Name the capital of France.\n")
    assert asked.returncode == 0 and "The capital of France is Paris." in out, err


def test_a_piped_text_goes_before_the_prompt(tiny, tmp_path):
    """The tiny tokenizer has a token for each byte."""

    def num_prompt_tokens(text, *flags, **options):
        running = process("run", "hello", *flags, *tiny, "--max-tokens=1", "--json", **options)
        out, err = running.communicate(text)
        assert running.returncode == 0, err
        return json.loads(out)["prompt_tokens"]

    alone = num_prompt_tokens("")
    assert num_prompt_tokens("some text\n") == alone + len("some text\n\n")
    assert num_prompt_tokens("some text\n", "--raw") == num_prompt_tokens("", "--raw") + 10
    assert num_prompt_tokens(None, stdin=subprocess.DEVNULL) == alone
    file = tmp_path / "text"
    file.write_text("some text\n")
    with file.open() as given:
        assert num_prompt_tokens(None, stdin=given) == alone + len("some text\n\n")


def test_a_pipe_that_gives_nothing_is_named(tiny):
    running = process("run", "hello", *tiny, "--max-tokens=1")
    assert "waiting for the end of standard input" in running.stderr.readline()
    _, err = running.communicate("")
    assert running.returncode == 0, err
