"""GGUF models of a hub on 127.0.0.1: quantizations, split files, headers, a gate, no network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.checkpoint.catalogue import resolve
from tests.support.live_hub import HubRepository, live_hub
from tests.support.tiny_gguf import tiny_model, write_tiny_gguf

pytestmark = pytest.mark.sampled(one_in=2)

NAME = "maker/tiny-GGUF"
FILL = 8 << 20
"""Bytes behind a file's tensors, as of a model that is much larger than its header."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder, model = tmp_path_factory.mktemp("gguf"), tiny_model("llama")
    made = {}
    for kind in ("Q8_0", "F16"):
        path = write_tiny_gguf(folder / f"tiny-{kind}.gguf", "llama", model, kind=kind, tokens=96)
        made[path.name] = path.read_bytes() + bytes(FILL)
    split = folder / "Q4_0"
    split.mkdir()
    write_tiny_gguf(split / "tiny.gguf", "llama", model, kind="Q4_0", tokens=96, max_tensors=10)
    made |= {f"Q4_0/{path.name}": path.read_bytes() for path in sorted(split.glob("*-of-*"))}
    return made | {"mmproj-F16.gguf": b"GGUF, but of images"}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[HubRepository]:
    small = {"config.json": b"{}", "README.md": b"not wanted"}
    with live_hub(HubRepository(NAME, small, dict(files), has_store=True)) as one:
        yield one


def octavo(hub: HubRepository, home: Path, *words: str, **variables: str) -> tuple[int, str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "OCTAVO_CACHE": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", *words],
        env=environment | {"HF_TOKEN": "hf_secret"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.strip(), done.stderr


def blobs(home: Path) -> int:
    return sum(path.stat().st_size for path in home.glob("hub/*/blobs/*"))


@pytest.mark.parametrize(
    ("reference", "file"),
    [
        (NAME, "Q4_0/tiny-00001-of-00003.gguf"),
        (f"hf.co/{NAME}:q8_0", "tiny-Q8_0.gguf"),
        (f"https://huggingface.co/{NAME}/blob/main/tiny-F16.gguf", "tiny-F16.gguf"),
        (f"{NAME}/Q4_0/tiny-00002-of-00003.gguf", "Q4_0/tiny-00001-of-00003.gguf"),
    ],
)
def test_a_pull_fetches_the_files_of_one_model(hub, files, tmp_path, reference, file):
    code, out, err = octavo(hub, tmp_path, "pull", reference)
    assert code == 0, err
    assert out.endswith(f"/{file}") and Path(out).read_bytes() == files[file]
    stem = file.partition("-00001-of-")[0]
    assert blobs(tmp_path) == sum(
        len(content) for name, content in files.items() if name.startswith((stem, "mmproj"))
    )
    assert "already cached" not in err
    code, again, err = octavo(hub, tmp_path, "pull", reference)
    assert (code, again) == (0, out)
    assert "already cached, and its checksums match" in err and "fetching" not in err
    code, again, err = octavo(hub, tmp_path, "pull", reference, HF_HUB_OFFLINE="1")
    assert (code, again) == (0, out) and "already cached; the hub cannot be reached" in err


@pytest.mark.model
def test_a_model_of_the_hub_runs_by_its_reference(hub, tmp_path):
    hub.large["SmolLM2-135M-Instruct.Q4_1.gguf"] = resolve("smollm2").read_bytes()
    words = ("--max-tokens=4", "Name the capital of France.", "--model", f"hf.co/{NAME}:q4_1")
    code, out, err = octavo(hub, tmp_path, "run", *words)
    assert code == 0 and out.startswith("The capital of France"), err
    assert "\r" not in err, "no bar where stderr is no terminal"


def test_a_plan_fetches_the_header_alone(hub, files, tmp_path):
    hub.large["tiny-Q8_0.gguf"] += bytes(32 << 20)
    for reference in (f"{NAME}:Q8_0", NAME):
        code, out, err = octavo(hub, tmp_path, "plan", reference)
        assert code == 0 and "weights" in out, err
    assert hub.sent_bytes < 6 << 20 and blobs(tmp_path) == 0


def test_what_the_cache_has_is_chosen_from_without_a_network(hub, tmp_path):
    """The default choice is among the cached models; one that is not cached is an error."""
    code, path, err = octavo(hub, tmp_path, "pull", f"{NAME}:F16")
    assert code == 0, err
    offline = {"HF_HUB_OFFLINE": "1"}
    for reference in (NAME, f"{NAME}:f16", f"hf.co/{NAME}/tiny-F16.gguf"):
        assert octavo(hub, tmp_path, "pull", reference, **offline)[:2] == (0, path)
    code, _, err = octavo(hub, tmp_path, "pull", f"{NAME}:Q8_0", **offline)
    assert code == 2
    assert (
        f"{NAME} has no quantization Q8_0: available are F16 (in the cache; the Hugging Face Hub"
        in err
    )
    code, _, err = octavo(hub, tmp_path, "pull", "maker/other:Q8_0", **offline)
    assert code == 2 and "not in the cache, and Hugging Face cannot be reached" in err


def test_an_unknown_quantization_lists_those_there_are(hub, tmp_path):
    code, out, err = octavo(hub, tmp_path, "run", "hello", "--model", f"{NAME}:Q3_K_S")
    assert code == 2 and not out and blobs(tmp_path) == 0
    assert err == (
        f"octavo: {NAME} has no quantization Q3_K_S: available are Q4_0, F16, Q8_0\n"
        f"hint: {NAME}:Q4_0\n"
    )


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("maker/none:Q4_0", "model 'maker/none:Q4_0': no such repository on Hugging Face"),
        (
            f"https://huggingface.co/{NAME}/resolve/v9/tiny-Q8_0.gguf",
            f"Hugging Face has no revision v9 of {NAME}",
        ),
        (f"{NAME}/../../x.gguf", "no such file or directory"),
        ("hf.co/../x", "no such file or directory"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(hub, tmp_path, reference, message):
    code, _, err = octavo(hub, tmp_path, "pull", reference)
    assert code == 2 and message in err and "hint: " in err


def test_a_gated_repository_says_where_its_terms_are(hub, tmp_path):
    hub.is_gated = True
    code, _, err = octavo(hub, tmp_path, "pull", f"{NAME}:Q8_0")
    assert code == 2 and f"accept its terms at https://huggingface.co/{NAME} and" in err


def test_a_cut_download_of_a_part_goes_on(hub, files, tmp_path):
    hub.cuts = [5 << 20]
    code, out, err = octavo(hub, tmp_path, "pull", f"{NAME}:F16")
    assert code == 0 and Path(out).read_bytes() == files["tiny-F16.gguf"], err


def test_a_damaged_file_is_not_kept(hub, tmp_path):
    hub.damaged = {"tiny-F16.gguf"}
    code, _, err = octavo(hub, tmp_path, "pull", f"{NAME}:F16")
    assert code == 2 and "tiny-F16.gguf has SHA-256" in err and "the download was discarded" in err
    assert blobs(tmp_path) == 0
