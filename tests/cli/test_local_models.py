"""`octavo list`, `show`, `rm` and `ps`: the models of this machine and of a server."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import constants

from octavo.checkpoint.catalogue import CATALOGUE, CatalogueModel, ModelFile
from tests.cli.conftest import run_counting_imports
from tests.support.free_ports import free_port
from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

REVISION = "1" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with a catalogue model, a GGUF file and a directory of safetensors."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = CatalogueModel("tiny", "CC0", (ModelFile("tiny.Q4_1.gguf", 2048, "", ()),))
    monkeypatch.setitem(CATALOGUE, "tiny", model)
    write(tmp_path / "models" / "tiny" / "tiny.Q4_1.gguf", bytes(2048))
    write_repository(tmp_path, "maker/one-GGUF", {"one-Q8_0.gguf": bytes(1024)})
    config = json.dumps({"quantization_config": {"quant_method": "awq"}}).encode()
    files = {"model.safetensors": bytes(4096 - len(config)), "config.json": config}
    write_repository(tmp_path, "maker/whole", files)
    return tmp_path


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_repository(cache, name, files):
    repo = cache / "hub" / f"models--{name.replace('/', '--')}"
    write(repo / "refs" / "main", REVISION.encode())
    for file, content in files.items():
        write(repo / "blobs" / file, content)
        link = repo / "snapshots" / REVISION / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(repo / "blobs" / file)


def rows(text):
    """Returns the cells of a table by its first column."""
    _, *lines = text.splitlines()
    return {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line) for line in lines)}


def test_the_list_has_name_size_quantization_and_time(octavo, cache):
    done = octavo("list")
    assert done.code == 0 and done.err == ""
    found = rows(done.out)
    assert found["tiny"][:2] == ["2.0 KiB", "Q4_1"]
    assert found["maker/one-GGUF/one-Q8_0.gguf"][:2] == ["1.0 KiB", "Q8_0"]
    assert found["maker/whole"][:2] == ["4.0 KiB", "awq"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", found["tiny"][2])


def test_an_empty_list_says_how_to_fetch_a_model(octavo, tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    done = octavo("list")
    assert done.code == 0 and rows(done.out) == {} and "octavo pull smollm2" in done.err


def test_rm_deletes_cached_models_and_says_what_was_freed(octavo, cache):
    done = octavo("rm", "tiny", "maker/one-GGUF:Q8_0", "tiny:latest")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "removed tiny: 2.0 KiB freed",
        "removed maker/one-GGUF/one-Q8_0.gguf: 1.0 KiB freed",
    ]
    assert rows(octavo("list").out).keys() == {"maker/whole"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tinny", "did you mean tiny?"),
        ("maker/none", "did you mean maker/whole?"),
        ("nothing", "octavo list"),
        ("./own.gguf", "delete this file"),
        ("", "octavo list"),
        ("..", "delete this file"),
        ("maker/../whole", "did you mean maker/whole?"),
    ],
)
def test_rm_of_an_unknown_name_deletes_nothing(octavo, cache, monkeypatch, name, hint):
    own = cache / "own.gguf"
    own.write_bytes(b"mine")
    monkeypatch.chdir(cache)
    done = octavo("rm", "tiny", name)
    assert done.code == 2 and done.out == ""
    assert "not in the cache" in done.err and hint in done.err
    assert own.exists() and len(rows(octavo("list").out)) == 3
    listed = json.loads(octavo("list", "--json").out)
    assert {one["name"] for one in listed} == rows(octavo("list").out).keys()
    assert all(one["num_bytes"] > 0 and Path(one["path"]).exists() for one in listed)


def test_rm_leaves_what_links_in_the_cache_lead_to(octavo, cache):
    own = cache / "own"
    write(own / "tiny.Q4_1.gguf", bytes(2048))
    write(own / "two-Q8_0.gguf", bytes(1024))
    octavo("rm", "tiny")
    (cache / "models" / "tiny").symlink_to(own)
    snapshot = cache / "hub" / "models--maker--one-GGUF" / "snapshots" / REVISION
    (snapshot / "two-Q8_0.gguf").symlink_to(own / "two-Q8_0.gguf")
    assert octavo("rm", "tiny", "maker/one-GGUF/two-Q8_0.gguf").code == 0
    assert len(list(own.iterdir())) == 2
    assert rows(octavo("list").out).keys() == {"maker/one-GGUF/one-Q8_0.gguf", "maker/whole"}


@pytest.mark.model
def test_show_describes_a_model(octavo):
    done = octavo("show", "smollm2")
    assert done.code == 0
    assert done.out.startswith("smollm2: llama, 134.5 M parameters, 93.8 MiB\n")
    facts = dict(
        re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in done.out.splitlines()[1:]
    )
    assert facts["quantization"].startswith("Q4_1 79%") and facts["context"] == "8,192 tokens"
    assert facts["chat template"] == "included" and facts["license"] == "apache-2.0"
    assert facts["sampling"].startswith("temperature 0, ") and facts["✓ native"] == "supported"
    found = json.loads(octavo("show", "smollm2", "--json").out)
    assert found["sampling"]["max_tokens"] == 1024 and found["license"] == "apache-2.0"
    assert found["tool_format"] is None and found["max_context_tokens"] == 8192
    assert json.loads(octavo("models", "smollm2", "--json").out) == found


def test_show_names_the_format_of_tool_calls(octavo, tmp_path):
    source = tiny_model_with_text()
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    template = "{% if tools %}<tools>{{ tools }}</tools><tool_call>{% endif %}</tool_call>"
    (tmp_path / "chat_template.jinja").write_text(template)
    found = json.loads(octavo("show", str(tmp_path), "--json").out)
    assert found["has_chat_template"] and found["tool_format"] == "hermes"
    assert found["license"] is None


def test_ps_lists_the_models_of_a_server(octavo):
    server = LiveServer(str(tiny_model_with_text()), "--served-model-name=tiny", key="secret")
    try:
        assert octavo("ps", f"--url={server.url}").code == 1
        done = octavo("ps", f"--url={server.url}", "--api-key=secret")
        assert done.code == 0, done.err
        name, (size, _, context, until) = next(iter(rows(done.out).items()))
        assert name == "tiny:latest" and float(size.split()[0]) > 0
        assert (context, until) == ("512", "forever")
        done = octavo("ps", f"--url={server.url}", "--api-key=secret", "--json")
        (model,) = json.loads(done.out)
        assert model["name"] == "tiny:latest" and model["size"] > 0
    finally:
        assert server.stop() == 0
    done = octavo("ps", f"--url={server.url}")
    assert done.code == 1 and "no server responds at" in done.err and "octavo serve" in done.err


def test_ps_without_a_server_is_a_sentence(octavo):
    done = octavo("ps", f"--url=http://127.0.0.1:{free_port()}")
    assert done.code == 1 and len(done.err.splitlines()) == 2


def test_they_import_no_engine():
    for command in ("list", "rm", "ps"):
        out, num_modules = run_counting_imports(command, "--help")
        assert f"octavo {command}" in out and num_modules < 700
