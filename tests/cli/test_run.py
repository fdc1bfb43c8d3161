"""`octavo run` prints one answer on stdout and statistics on stderr."""

import io
import json
import subprocess
import sys
import time

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.run import sampling_for
from tests.cli.conftest import SMALL, process
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
        "12 new tokens" in ended.message[-1]
        and "tokens/s" in ended.message[-1]
        and "first token after" in ended.message[-1]
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
        "octavo.backends.reference.backend",
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
    assert "octavo.llm" in imported and not NOT_NEEDED & imported


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


def test_a_dash_reads_the_prompt_from_stdin(octavo, tiny, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert (
        octavo("run", "--raw", "-", *tiny, "--max-tokens=8").out
        == answer_of("hello", max_tokens=8) + "\n"
    )


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
    monkeypatch.setattr("octavo.cli.run.DEFAULT_MAX_TOKENS", 7)
    said = "the answer was cut off after 7 tokens, the default of --max-tokens: give a larger one"
    ended = octavo("run", "--raw", "hello", *tiny)
    assert "7 new tokens" in ended.message[0] and ended.message[-1].startswith(said)
    ended = octavo("run", "--raw", "hello", *tiny, "--max-tokens=7")
    assert "7 new tokens" in ended.message[-1], "a limit that was given needs no explanation"


def test_a_seed_repeats_the_draws(octavo, tiny):
    texts = [
        octavo("run", "hello", *tiny, "--max-tokens=12", "--temperature=1", f"--seed={seed}").out
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_least_top_p_is_greedy(octavo, tiny):
    greedy = octavo("run", "hello", *tiny, "--max-tokens=12").out
    assert (
        octavo("run", "hello", *tiny, "--max-tokens=12", "--temperature=1", "--top-p=0.000001").out
        == greedy
    )


@pytest.mark.parametrize(
    ("recommended", "given", "expected"),
    [({}, None, 0), ({"temperature": 0.6}, None, 0.6), ({"temperature": 0.6}, 0, 0)],
)
def test_the_temperature_is_what_is_given_else_what_the_makers_say_else_0(
    recommended, given, expected
):
    class Model:
        generation_config = recommended

        def get_default_sampling_params(self):
            return SamplingParams(**recommended)

    params = sampling_for(Model(), {"temperature": given, "max_tokens": None, "seed": None})
    assert (params.temperature, params.max_tokens) == (expected, None)


@pytest.mark.alone
@pytest.mark.model
def test_the_default_model_knows_paris_and_begins_in_time():
    """The time runs from the process' start to its first byte, with the model in the cache.

    The best of three counts, since the machine may be busy.
    """

    def ask() -> tuple[float, str]:
        start = time.perf_counter()
        running = process("run", "What is the capital of France?")
        first = running.stdout.read(1)
        seconds = time.perf_counter() - start
        out, err = running.communicate(timeout=60)
        assert running.returncode == 0, err
        return seconds, first + out

    answers = [ask() for _ in range(3)]
    assert all("Paris" in text for _, text in answers)
    assert min(seconds for seconds, _ in answers) < 1.5
