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
PLAIN = ("config", "engine", "frontend", "server", "wiring", "worker")
"""Packages that may not name what extensions do."""
WORDS = re.compile(
    r"sparsi|predictor|neuron|select_keys|kv_selection|skip_zeros|spill|hot_neurons|"
    r"prefix_weigh|weigher|probe_prefix|important_block|prefix_cache_policy|prefix_cache_load",
    re.IGNORECASE,
)
ALLOWED = {
    "engine/protocol/step.py": 8,  # counts of neurons in WeightArrivals
    "engine/requests/request.py": 4,  # these counts in the timings of an answer
    "server/openai/protocol.py": 2,  # and their names in its body
}
"""Occurrences of these words that remain, by file."""


def engine_without_extensions(folder: Path, code: str, *arguments: str) -> str:
    """Runs code on a copy of the package that has no extensions; returns what it prints."""
    copy = folder / "octavo"
    if not copy.exists():
        shutil.copytree(
            PACKAGE, copy, ignore=shutil.ignore_patterns(*EXTENSIONS, "__pycache__"), symlinks=True
        )
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


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tmp_path_factory.mktemp("plain")


def test_some_extension_is_installed():
    assert "sparsity" in EXTENSIONS and len(get_extensions()) == len(EXTENSIONS)


def test_no_file_outside_imports_an_extension():
    named = [f"octavo.{name}" for name in EXTENSIONS]
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).parts[0] not in EXTENSIONS:
            text = file.read_text()
            assert not [name for name in named if name in text], file


def test_the_plain_path_names_nothing_that_extensions_do():
    found = {}
    for package in PLAIN:
        for file in (PACKAGE / package).rglob("*.py"):
            if words := WORDS.findall(file.read_text()):
                found[str(file.relative_to(PACKAGE))] = len(words)
    assert found == ALLOWED


GENERATE = """
import octavo, sys
from octavo import LLM, SamplingParams
assert octavo.__file__.startswith(sys.argv[1]), octavo.__file__
llm = LLM(sys.argv[2], backend="native", skip_tokenizer_init=True, max_model_len=64)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
(answer,) = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params)
print(list(answer.outputs[0].token_ids))
print(any("sparsity" in name for name in sys.modules))
"""

REFUSE = """
from octavo.api.errors import ConfigError
from octavo.config.engine_config import EngineConfig
for name, value in (("ffn_sparsity", "exact"), ("kv_spill_dir", "/tmp")):
    try:
        EngineConfig.from_options(**{name: value})
    except ConfigError as error:
        print(error.message)
"""

COMMAND = """
from octavo.cli.app import run_command
sys.exit(run_command(sys.argv[1:]))
"""


def test_the_engine_generates_the_same_without_extensions(plain):
    model = str(tiny_model("llama").path)
    tokens, loaded = engine_without_extensions(plain, GENERATE, str(plain), model).splitlines()
    assert loaded == "False"
    with LLM(model, backend="native", skip_tokenizer_init=True, max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (answer,) = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params)
    assert tokens == str(list(answer.outputs[0].token_ids))


def test_options_of_a_missing_extension_are_refused_by_name(plain):
    assert engine_without_extensions(plain, REFUSE).splitlines() == [
        "unknown option 'ffn_sparsity'",
        "unknown option 'kv_spill_dir'",
    ]


def test_commands_run_without_extensions(plain):
    helped = engine_without_extensions(plain, COMMAND, "serve", "--help-all")
    assert "--max-num-seqs" in helped and "--ffn-sparsity" not in helped
    planned = engine_without_extensions(plain, COMMAND, "plan", str(tiny_model("llama").path))
    assert "try: octavo serve" in planned
    assert "calibrate" not in engine_without_extensions(plain, COMMAND, "--help")
