"""Every example of README.md, of the guides and of examples/ runs as a reader would run it, with
the default model, and its answer is sensible.

An example that cannot run here is named in NOT_RUN, with the reason.
"""

import difflib
import importlib.util
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from octavo.checkpoint.catalogue import resolve
from tests.support import doc_models
from tests.support.doc_blocks import ROOT
from tests.support.doc_models import Placeholders
from tests.support.doc_session import DocSession, Ended, Example, examples_in
from tests.support.peft_adapters import save_adapter
from tests.support.sensible import faults_of, response_faults
from tests.support.tiny_images import picture, seeing_model
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import tiny_model_with_text
from tests.support.tiny_whisper import noise, tiny_multilingual_whisper

README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))

NOT_RUN = {
    ("README.md", "make"): "installs; the other examples need what it installed",
    (
        "docs/guides/access.md",
        "octavo serve smollm2 --host 0.0.0.0",
    ): "certificates; see tests/server",
    ("docs/guides/access.md", "octavo serve smollm2 --uds"): "a directory of the system",
    ("docs/guides/add-a-family.md", "from octavo"): "defines a module; tests/arch compiles it",
    ("docs/guides/agents.md", "octavo serve"): "a model for agents; see tests/clients",
    ("docs/guides/agents.md", "ANTHROPIC_"): "runs Claude Code",
    ("docs/guides/agents.md", "OPENAI_API_BASE_URL"): "runs Open WebUI",
    ("docs/guides/clients.md", "octavo serve qwen3-8b"): "a model for agents; see tests/clients",
    ("docs/guides/clients.md", "ANTHROPIC_"): "runs Claude Code",
    ("docs/guides/cluster.md", ""): "needs Ray on several machines",
    ("docs/guides/images.md", "pip"): "installs",
    ("docs/guides/images.md", "octavo serve ./Qwen2.5"): "a GGUF model; see tests/checkpoint",
    ("docs/guides/load-testing.md", "octavo bench serve"): "takes minutes; see tests/cli",
    ("docs/guides/models.md", "octavo rm"): "deletes a download; see tests/cli",
    ("docs/guides/models.md", "octavo ps"): "asks port 8000, which may be in use; see tests/cli",
    ("docs/guides/models.md", "octavo pull unsloth"): "downloads gigabytes; see tests/checkpoint",
    ("docs/guides/models.md", "octavo serve hf.co"): "downloads gigabytes; see tests/checkpoint",
    ("docs/guides/monitoring.md", "octavo top"): "runs until it is stopped; see tests/cli",
    ("docs/guides/new-models.md", ""): "a model of a new type; see tests/derive",
    ("docs/guides/page.md", "octavo replay"): "runs until it is stopped; see tests/browser",
    ("docs/guides/prefill-and-decode.md", "octavo serve MODEL"): "a model with 4 KV heads",
    ("docs/guides/prefill-and-decode.md", "octavo serve --kv-transfer"): (
        "listens on an address of another machine"
    ),
    ("docs/guides/prefill-and-decode.md", "pip"): "installs",
    ("docs/guides/prefill-and-decode.md", "octavo serve smollm2 --port 8001 --kv-transfer m"): (
        "needs mooncake"
    ),
    ("docs/guides/prefill-and-decode.md", "octavo serve smollm2 --port 8001 --kv-transfer n"): (
        "needs nixl"
    ),
    ("docs/guides/production.md", "octavo serve smollm2 --host"): "keys; see tests/server",
    ("docs/guides/production.md", "octavo bench serve"): "takes minutes; see tests/cli",
    ("docs/guides/quantization.md", ""): "takes minutes; see tests/cli",
    ("docs/guides/quickstart.md", "make"): "installs",
    ("docs/guides/running-requests.md", "curl -X PATCH"): "needs a running request",
    ("docs/guides/running-requests.md", "curl http://127.0.0.1:8000/v1/requests/"): (
        "needs a running request"
    ),
    ("docs/guides/several-models.md", ""): "pulls and deletes models; see tests/server",
    ("docs/guides/several-servers.md", ""): "several machines; see tests/distributed",
    (
        "docs/guides/sparsity.md",
        "octavo serve MODEL --quantization int8 --ffn-sparsity e",
    ): "a model with the activation relu; see tests/api",
    ("docs/guides/sparsity.md", "octavo calibrate MODEL --quantization"): "takes minutes",
    ("docs/guides/sparsity.md", "octavo serve MODEL --quantization int8 --sp"): (
        "needs the predictors of the minutes before"
    ),
    ("docs/guides/speculation.md", "python benchmarks"): "takes minutes",
    ("docs/guides/tools.md", "curl http://127.0.0.1:8000/v1/responses"): (
        "needs an MCP server; see tests/server/test_mcp.py"
    ),
    ("docs/guides/training.md", ""): "weights of a trainer; see tests/server",
    ("docs/guides/tuning.md", "octavo bench serve"): "takes minutes; see tests/cli",
    ("docs/guides/two-machines.md", ""): "several machines; see tests/distributed",
    ("docs/guides/vllm-router.md", ""): "another project's router; see tests/clients",
}
"""Why examples do not run, by their page and their beginning."""

PRINTS_DATA = {
    "examples/beam_search.py",
    "examples/kv_map.py",
    "examples/simulate_fleet.py",
    "docs/guides/embeddings.md",
}
"""Pages whose output is numbers or variants of one sentence, not prose."""

STAND_INS: dict[tuple[str, str], Callable[[Path], Placeholders]] = {
    ("docs/guides/adapters.md", ""): doc_models.adapters,
    ("docs/guides/encoder-decoders.md", ""): doc_models.translator,
    ("docs/guides/images.md", ""): doc_models.images,
    ("docs/guides/larger-than-memory.md", "octavo serve MODEL --weights-memory-bytes 4GiB"): (
        doc_models.experts
    ),
}
"""Files that examples need and their stand-ins for models, by page and beginning."""

WITH_SMOLLM2 = ("adapters.md",)
"""Pages of STAND_INS whose answers are nevertheless SmolLM2's."""


def adapters(folder: Path) -> tuple[str, ...]:
    llama = tiny_model("llama")
    model = tiny_model_with_text()
    found = (save_adapter(llama, folder / f"adapter-{seed}", seed=seed) for seed in (1, 2))
    return str(model), *map(str, found)


def image(folder: Path) -> tuple[str, ...]:
    picture(1).save(folder / "picture.png")
    return str(folder / "picture.png"), str(seeing_model("qwen2_5_vl").path)


def sound(folder: Path) -> tuple[str, ...]:
    (folder / "noise.wav").write_bytes(noise(1)[1])
    return str(folder / "noise.wav"), str(tiny_multilingual_whisper())


TINY: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "examples/image.py": image,
    "examples/lora_swap.py": adapters,
    "examples/speech.py": sound,
}
"""Arguments of the programs that run with tiny random models, whose output is no prose."""
MIN_SIMILARITY = 0.6
"""Minimum similarity of a printed line to one in a docstring: another processor may round logits
differently, and times differ.
"""

CONFIG = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
"""The config.json that a reader of the serving guide has: sizes of Llama 3 8B."""


def key_of(
    example: Example, table: Collection[tuple[str, str]] = NOT_RUN
) -> tuple[str, str] | None:
    return next(
        (
            (page, start)
            for page, start in table
            if page == example.page and example.text.startswith(start)
        ),
        None,
    )


def is_prose(example: Example) -> bool:
    """Returns whether an example's answer is SmolLM2's: tiny random models write no prose."""
    return example.page not in PRINTS_DATA | TINY.keys() and (
        key_of(example, STAND_INS) is None or example.page.endswith(WITH_SMOLLM2)
    )


def missing_packages(example: Example) -> list[str]:
    """Returns the packages that a Python example imports and that are not installed."""
    found = re.findall(r"^(?:from|import) (\w+)", example.text, re.MULTILINE)
    return [name for name in found if importlib.util.find_spec(name) is None]


def is_run(example: Example) -> bool:
    return key_of(example) is None and not (
        example.language == "python" and missing_packages(example)
    )


def faults(example: Example, ended: Ended) -> list[str]:
    """Returns what a reader would complain about."""
    if ended.code:
        return [f"exit code {ended.code}: {ended.err[-800:]}"]
    if example.language == "python":
        missing = [f"it does not print {line!r}" for line in missing_lines(example, ended)]
        if not ended.out.strip():
            missing.append("it prints nothing")
        return missing + (prose_faults(example, ended) if is_prose(example) else [])
    if example.printed:
        return [] if example.printed in ended.out else [f"it prints {ended.out!r}"]
    words = example.words
    if not is_prose(example):
        is_error = '"error"' in ended.out or not ended.out.strip()
        return [f"it prints {ended.out!r}"] if is_error else []
    if words[:1] == ["curl"] or example.is_server:
        return response_faults(example.text, ended.out)
    if words[:2] in (["octavo", "run"], ["octavo", "chat"]):
        return prose_faults(example, ended)
    return [] if ended.out.strip() else ["it prints nothing"]


def prose_faults(example: Example, ended: Ended) -> list[str]:
    notes = re.findall(r".*(?:repeats itself|truncated after).*", ended.err)
    return faults_of(example.text, ended.out) + notes


def missing_lines(example: Example, ended: Ended) -> list[str]:
    """Returns the lines of a docstring's output that the program does not print; "..." stands for
    any text.
    """
    lines = [without_numbers(line) for line in ended.out.splitlines()]
    missing = []
    for shown in example.printed.splitlines():
        start = without_numbers(shown).removesuffix("...")
        close = [
            difflib.SequenceMatcher(None, start, line[: len(start) + 8]).ratio() for line in lines
        ]
        if max(close, default=0.0) < MIN_SIMILARITY and start:
            missing.append(shown)
    return missing


def without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.,]*", "#", line)


def check(page, tmp_path):
    session, found = DocSession(tmp_path), []
    weights = resolve("smollm2")
    (tmp_path / "model.gguf").symlink_to(weights)
    (tmp_path / "text.txt").write_text(
        (ROOT / "docs" / "guides" / "larger-than-memory.md").read_text()
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "data").mkdir()
    try:
        for example in filter(is_run, examples_in(page)):
            if example.page in TINY:
                example = example._replace(arguments=TINY[example.page](tmp_path))
            stand_in = key_of(example, STAND_INS)
            session.placeholders = {} if stand_in is None else STAND_INS[stand_in](tmp_path)
            ended = session.run(example)
            print(f"--- {example}\n{ended.out}")
            found += [f"{example}: {fault}\n{ended.out}" for fault in faults(example, ended)]
    finally:
        session.close()
    assert not found, "\n".join(found)


@pytest.mark.model
def test_readme(tmp_path):
    check(README, tmp_path)


@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guide(page, tmp_path):
    check(page, tmp_path)


@pytest.mark.model
@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script(script, tmp_path):
    assert len(script.read_text().splitlines()) <= 60
    check(script, tmp_path)


def test_the_table_names_examples():
    examples = [example for page in (README, *GUIDES, *SCRIPTS) for example in examples_in(page)]
    assert NOT_RUN.keys() == {key for each in examples if (key := key_of(each)) is not None}
    run = list(filter(is_run, examples))
    used = {key for each in run if (key := key_of(each, STAND_INS)) is not None}
    assert STAND_INS.keys() == used
    assert len(run) > 90
