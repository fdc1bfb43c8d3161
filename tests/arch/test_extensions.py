"""Extensions: nothing outside of them names them, and the engine runs without them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.executor.native.extension import native_module
from octavo.utils.extensions import PACKAGE, get_extensions
from tests.support.tiny_models import tiny_model

EXTENSIONS = sorted(file.parent.name for file in PACKAGE.glob("*/extension.py"))
WITHOUT = [*((name,) for name in EXTENSIONS), tuple(EXTENSIONS)]
"""The extensions that are missing: each alone, and all."""
PLAIN = ("config", "engine", "frontend", "server", "wiring", "worker")
"""Packages that may not name what extensions do."""
WORDS = {
    "derive": re.compile(
        r"transformers_version|octavo derive\b|make_fx|fake_tensor", re.IGNORECASE
    ),
    "distributed": re.compile(
        r"mooncake(?! \(Qin)|nixl|\bray\b|kv_transfer(?!_params)|kv_pool|prefill_peer(?!s)|"
        r"octavo (?:route|cluster)\b",
        re.IGNORECASE,
    ),
    "sparsity": re.compile(
        r"sparsi|predictor|neuron|select_keys|kv_selection|skip_zeros|spill|hot_neurons|"
        r"prefix_weigh|weigher|probe_prefix|important_block|prefix_cache_policy|prefix_cache_load",
        re.IGNORECASE,
    ),
}
ALLOWED: dict[str, dict[str, int]] = {
    "derive": {},
    "distributed": {
        "server/routes/capabilities.py": 1,  # a key of GET /v1/capabilities
        "server/state/metrics.py": 1,  # a counter of ConnectorStats
    },
    "sparsity": {
        "engine/protocol/step.py": 8,  # counts of neurons in WeightArrivals
        "engine/requests/request.py": 4,  # these counts in the timings of an answer
        "server/openai/protocol.py": 2,  # and their names in its body
    },
}
"""Occurrences of these words that remain, by file."""
OPTION = {"distributed": "kv_transfer", "sparsity": "ffn_sparsity"}
"""One option of each extension that has options."""
COMMANDS = {
    "derive": ("derive",),
    "distributed": ("cluster", "route"),
    "sparsity": ("calibrate", "simulate"),
}


def run_without(extensions: tuple[str, ...], folder: Path, code: str, *arguments: str) -> str:
    """Runs code on a copy of the package without these extensions; returns its output."""
    copy = folder / "octavo"
    if not copy.exists():
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, copy, ignore=left_out, symlinks=True)
        for name in extensions:
            shutil.rmtree(copy / name)
        for file in Path(native_module().__file__).parent.glob("*.so"):
            shutil.copy(file, copy / "executor" / "native")
    prelude = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); sys.meta_path[:] = ["
        'each for each in sys.meta_path if "editable" not in type(each).__module__]'
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", f"{prelude}\n{code}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module", params=WITHOUT, ids="-".join)
def missing(request):
    return request.param


@pytest.fixture(scope="module")
def plain(missing, tmp_path_factory):
    return tmp_path_factory.mktemp("plain")


def test_extensions_are_installed():
    assert EXTENSIONS == ["derive", "distributed", "sparsity"] and len(get_extensions()) == 3


@pytest.mark.parametrize("name", EXTENSIONS)
def test_no_file_outside_imports_an_extension(name):
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).parts[0] != name:
            assert f"octavo.{name}" not in file.read_text(), file


@pytest.mark.parametrize("name", EXTENSIONS)
def test_the_plain_path_names_nothing_that_extensions_do(name):
    found = {}
    for package in PLAIN:
        for file in (PACKAGE / package).rglob("*.py"):
            if words := WORDS[name].findall(file.read_text()):
                found[str(file.relative_to(PACKAGE))] = len(words)
    assert found == ALLOWED[name]


GENERATE = """
import octavo, sys
from octavo import LLM, SamplingParams
assert octavo.__file__.startswith(sys.argv[1]), octavo.__file__
llm = LLM(sys.argv[2], backend="native", skip_tokenizer_init=True, max_model_len=64)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
(answer,) = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params)
print(list(answer.outputs[0].token_ids))
print([name for name in sys.argv[3:] if f"octavo.{name}" in sys.modules])
"""

SERVE = """
import asyncio, sys
from octavo import AsyncLLM, SamplingParams
async def main():
    llm = AsyncLLM.from_options(
        model=sys.argv[1], backend="native", skip_tokenizer_init=True, max_model_len=64,
        data_parallel_size=2)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    async for answer in llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params):
        pass
    print(list(answer.outputs[0].token_ids), llm.prefill_peers)
    llm.close()
asyncio.run(main())
"""

REFUSE = """
import sys
from octavo.api.errors import ConfigError
from octavo.config.engine_config import EngineConfig
for name in sys.argv[1:]:
    try:
        EngineConfig.from_options(**{name: "zmq"})
    except ConfigError as error:
        print(error.message)
"""

COMMAND = """
from octavo.cli.app import run_command
sys.exit(run_command(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def tokens():
    model = str(tiny_model("llama").path)
    with LLM(model, backend="native", skip_tokenizer_init=True, max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (answer,) = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params)
    return list(answer.outputs[0].token_ids)


def test_the_engine_generates_the_same_without_extensions(missing, plain, tokens):
    model = str(tiny_model("llama").path)
    found, loaded = run_without(missing, plain, GENERATE, str(plain), model, *missing).splitlines()
    assert (found, loaded) == (str(tokens), "[]")


def test_engines_in_processes_generate_the_same_without_extensions(missing, plain, tokens):
    model = str(tiny_model("llama").path)
    assert run_without(missing, plain, SERVE, model).strip() == f"{tokens} []"


def test_options_of_a_missing_extension_are_refused_by_name(missing, plain):
    options = [OPTION[name] for name in missing if name in OPTION]
    assert run_without(missing, plain, REFUSE, *options).splitlines() == [
        f"unknown option {option!r}" for option in options
    ]


def test_commands_run_without_extensions(missing, plain):
    helped = run_without(missing, plain, COMMAND, "serve", "--help-all")
    flags = {name: f"--{option.replace('_', '-')}" for name, option in OPTION.items()}
    assert "--max-num-seqs" in helped
    assert {name for name, flag in flags.items() if flag not in helped} == {*missing} & {*flags}
    planned = run_without(missing, plain, COMMAND, "plan", str(tiny_model("llama").path))
    assert "try: octavo serve" in planned
    assert "default" in run_without(missing, plain, COMMAND, "doctor")
    commands = run_without(missing, plain, COMMAND, "--help").split()
    for name in EXTENSIONS:
        assert [each in commands for each in COMMANDS[name]] == len(COMMANDS[name]) * [
            name not in missing
        ]
