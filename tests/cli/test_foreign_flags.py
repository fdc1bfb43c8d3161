"""Flags of llama.cpp, vLLM and Ollama: each is translated, ignored with a line, or explained."""

import json
from pathlib import Path

import pytest
import typer

from octavo.api.errors import ConfigError
from octavo.cli.app import build_app
from octavo.cli.foreign.foreign_flags import MODEL, PROMPT
from octavo.cli.foreign.translate_flags import (
    FOREIGN_FLAGS,
    OVERRIDE_NAMES,
    OVERRIDES,
    ROWS,
    VALUES,
    translate,
)

LISTS = json.loads((Path(__file__).parents[1] / "data" / "engine_flags.json").read_text())
COMMANDS = ("run", "chat", "serve", "plan", "bench throughput")
WITH_A_ROW = [(row, name) for row in ROWS for name in row.names]


def parameters_of(path: str):
    command = typer.main.get_command(build_app())
    context = command.make_context("octavo", [], resilient_parsing=True)
    for name in path.split():
        command = command.commands[name]
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
    return command.get_params(context)


PARAMETERS = {path: parameters_of(path) for path in COMMANDS}
OWN = {
    path: {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
    for path, params in PARAMETERS.items()
}


def translated(path, *arguments):
    return translate(f"octavo {path}", PARAMETERS[path], arguments)


@pytest.mark.parametrize("engine", LISTS)
def test_every_flag_of_the_other_engines_is_known(engine):
    missing = [
        name for name in LISTS[engine].split() if name not in {*FOREIGN_FLAGS, *OWN["serve"]}
    ]
    assert not missing


def sample_of(row) -> str:
    """Returns a value that the row's conversion takes."""
    for value in ("7", "q8_0", "none", "https://example.org"):
        try:
            if row.convert is None or row.convert(value) is not None:
                return value
        except ValueError:
            continue
    raise AssertionError(f"no value fits {row.names}")


@pytest.mark.parametrize(("row", "name"), WITH_A_ROW, ids=[name for _, name in WITH_A_ROW])
def test_each_row_does_what_it_says(row, name, capsys):
    """On `octavo serve`, or where its target exists. The words around a flag stay as they were."""
    if FOREIGN_FLAGS[name] is not row:
        return
    targets = [flag.partition("=")[0] for flag in (row.target, *row.extra) if flag]
    if row.is_sampling:
        return  # the next test
    path = "serve" if {*targets} - {MODEL} <= OWN["serve"] or not targets else "run"
    if name in OWN[path]:
        assert translated(path, name, "3") == [name, "3"], "the command's own flag wins"
        return
    given = [name] if row.takes == "nothing" else [name, sample_of(row)]
    if row.takes == "perhaps":
        given = [name, "on"]
    if row.is_refused:
        with pytest.raises(ConfigError, match=f"a flag of {row.engine}") as caught:
            translated(path, "before", *given)
        assert caught.value.hint == row.text
        return
    found = translated(path, "before", *given, "after")
    said = capsys.readouterr().err
    assert found[0] == "before" and found[-1] == "after"
    if targets:
        assert said == ""
        value = row.convert(given[1]) if row.convert else given[-1]
        is_argument = row.target in (MODEL, PROMPT)
        expected = [value] if is_argument else [row.target, value] if row.target else []
        made = found[1:-1]
        assert made == [*(["--model"] if made[0] == "--model" else []), *expected, *row.extra]
    else:
        assert found == ["before", "after"]
        assert said == f"octavo: {' '.join(given)} is ignored: {row.text}\n"


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.is_sampling], ids=lambda row: row.target
)
def test_sampling_values_become_options_or_defaults(row):
    """`octavo run` has some as options; the others are defaults, in the generation config."""
    for path in COMMANDS:
        for name in row.names:
            if row.target in OWN[path]:
                assert translated(path, name, "2") == [row.target, "2"]
            elif OVERRIDES in OWN[path]:
                field = row.target[2:].replace("-", "_")
                field = OVERRIDE_NAMES.get(field, field)
                assert translated(path, name, "2") == [f'{OVERRIDES}={{"{field}": 2}}']
            else:
                with pytest.raises(ConfigError, match=f"not supported by octavo {path}"):
                    translated(path, name, "2")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_what_a_row_points_to_exists(row):
    flags = set().union(*OWN.values())
    assert row.target in (None, MODEL, PROMPT) or row.is_sampling or row.target in flags
    named = {word.strip(".,;:()`=") for word in row.text.split() if word.startswith("--")}
    assert named - {"--install-completion", "--version"} <= flags, row.text


@pytest.mark.parametrize("path", COMMANDS)
def test_common_flags_work_on_every_command(path, capsys):
    made = translated(path, "-t", "2", "-c", "4096", "-ngl", "99", "-m", "x.gguf", "-np", "4")
    model = ["--model", "x.gguf"] if "--model" in OWN[path] else ["x.gguf"]
    assert made == ["--threads", "2", "--max-model-len", "4096", *model, "--max-num-seqs", "4"]
    assert "-ngl 99 is ignored: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (["--temp", "0.5", "--n-predict=9"], ["--temperature", "0.5", "--max-tokens", "9"]),
        (["-c", "0", "-t", "-1", "-n", "-1"], []),
        (
            ["--max_model_len=4k", "--max_num_seqs", "3"],
            ["--max-model-len", "4k", "--max-num-seqs", "3"],
        ),
        (["-ctk", "q8_0", "-ctv", "q8_0"], ["--kv-cache-dtype", "int8"] * 2),
        (["-ctk", "q4_0", "-ctv", "q4_0"], ["--kv-cache-dtype", "int4"] * 2),
        (["--dtype", "half"], ["--dtype", "float16"]),
        (["--dtype=bfloat16"], ["--dtype", "bfloat16"]),
        (["--quantization", "awq"], []),
        (["-q", "int8"], ["--quantization", "int8"]),
        (["--load-format", "safetensors"], []),
        (["--swap-space", "4"], ["--swap-space", "4GiB"]),
        (["--swap-space", "512MiB"], ["--swap-space", "512MiB"]),
        (["--enable-prefix-caching=false"], ["--no-enable-prefix-caching"]),
        (["--enforce-eager=True"], ["--enforce-eager"]),
        (["--async-scheduling", "hi"], ["--async-scheduling", "on", "hi"]),
        (["--async-scheduling", "off"], ["--async-scheduling", "off"]),
        (["-fa", "hi"], ["hi"]),
        (["--flash-attn", "auto", "hi"], ["hi"]),
        (["-O3"], []),
        (["--device", "CUDA0"], ["--device", "cuda"]),
        (["--system", "-ngl", "hi"], ["--system", "-ngl", "hi"]),
        (["--", "-ngl"], ["--", "-ngl"]),
        (["-m", "x", "-p", "hi", "-st", "--color"], ["--model", "x", "hi"]),
        (["x", "-sys", "be brief", "-no-cnv"], ["x", "--system", "be brief"]),
        (["--no-such-flag", "-Z"], ["--no-such-flag", "-Z"]),
        (["--system"], ["--system"]),
    ],
    ids=" ".join,
)
def test_values_are_converted(given, made):
    assert translated("run", *given) == made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["-ctk", "q5_0"], "-ctk: got 'q5_0': expected f32, f16, bf16, q8_0, q4_0"),
        (["-ctk", "q8_0", "-ctv", "f16"], "-ctv: got bf16, but -ctk is int8"),
        (["-t"], "-t: got no value"),
        (["--ssl-cert-file", "x"], "(--ssl-certfile in Octavo), not supported by octavo run"),
        (["--cors-origins", "a,b"], "--cors-origins: got 'a,b': give --allow-origin once for each"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_what_cannot_be_translated_is_said(given, message):
    with pytest.raises(ConfigError) as caught:
        translated("run", *given)
    assert message in caught.value.message


def test_own_values_that_are_rewritten_are_own_flags():
    assert set(VALUES) <= OWN["serve"] | OWN["run"]


def test_a_whole_command_line(octavo, tiny):
    ended = octavo(
        "run", "hi", *tiny, "--temp", "0", "-n", "3", "-ngl", "99", "--trust-remote-code"
    )
    assert ended.code == 0 and "3 completion tokens" in ended.err
    assert "octavo: -ngl 99 is ignored: all layers are on one device" in ended.err
    assert (
        "octavo: --trust-remote-code is ignored: no code of a checkpoint is ever run" in ended.err
    )


def test_a_flag_without_a_counterpart_is_explained(octavo):
    ended = octavo("run", "hi", "--hf-file", "x.gguf")
    assert ended.code == 2
    assert ended.err.splitlines() == [
        "octavo: --hf-file: a flag of llama.cpp, not of Octavo",
        "hint: name the file with the model: OWNER/REPO/FILE.gguf",
    ]
