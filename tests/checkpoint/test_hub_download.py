"""`octavo pull` from a hub on 127.0.0.1: cuts, wrong hashes, refusals, a full disk, two at once."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live_hub import HubRepository, live_hub

pytestmark = pytest.mark.sampled(one_in=2)

WEIGHTS = random.Random(5).randbytes(36_000_000)
CHUNK_BYTES = 10 << 20
"""Bytes that huggingface-hub writes at a time; a cut loses less."""
NAME = "maker/tiny"


@pytest.fixture
def hub() -> Iterator[HubRepository]:
    small = {"config.json": b'{"model_type": "llama"}', "README.md": b"not wanted"}
    with live_hub(HubRepository(NAME, small, {"model.safetensors": WEIGHTS})) as one:
        yield one


def start_pull(hub: HubRepository, home: Path, **options: object) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "OCTAVO_CACHE": str(home)}
    return subprocess.Popen(
        [sys.executable, "-m", "octavo.cli.main", "pull", NAME],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def pull(hub: HubRepository, home: Path, **options: object) -> tuple[int, str, str]:
    process = start_pull(hub, home, **options)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    return process.returncode, out.strip(), err


def check_whole(out: str) -> None:
    folder = Path(out)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.slow
def test_a_pull_goes_on_after_cuts_and_says_where_the_model_comes_from(hub, tmp_path):
    draw = random.Random(11)
    hub.cuts = [draw.randrange(CHUNK_BYTES, 2 * CHUNK_BYTES) for _ in range(2)]
    code, out, err = pull(hub, tmp_path)
    assert code == 0, err
    check_whole(out)
    assert f"fetching {NAME} from {hub.url}/{NAME} at 0123456789ab: 36.0 MB" in err
    assert hub.ranges == ["", *(f"bytes={count * CHUNK_BYTES}-" for count in (1, 2))]
    assert hub.sent_bytes < len(WEIGHTS) + 2 * CHUNK_BYTES
    assert "\r" not in err, "no bar where stderr is no terminal"


def test_a_pull_goes_on_where_a_killed_one_stopped(hub, tmp_path):
    hub.cuts = [25_000_000, *[0] * 9]
    first = start_pull(hub, tmp_path)
    give_up = time.monotonic() + 60
    while len(hub.ranges) < 2 and time.monotonic() < give_up:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    part = next(tmp_path.glob("hub/*/blobs/*.octavo-part"))
    kept = part.stat().st_size
    assert kept == 2 * CHUNK_BYTES
    hub.cuts.clear()
    code, out, err = pull(hub, tmp_path)
    assert code == 0, err
    check_whole(out)
    assert hub.ranges[-1] == f"bytes={kept}-"


def test_a_wrong_hash_keeps_nothing_and_the_next_pull_is_whole(hub, tmp_path):
    for file, kind in (("model.safetensors", "SHA-256"), ("config.json", "git SHA-1")):
        hub.damaged = {file}
        code, _, err = pull(hub, tmp_path)
        assert (
            code == 2
            and f"{NAME}: {file} has {kind}" in err
            and "the download was discarded" in err
        )
    hub.damaged = set()
    code, out, err = pull(hub, tmp_path)
    assert code == 0, err
    check_whole(out)


def test_a_cached_file_that_was_damaged_is_found_by_pull(hub, tmp_path):
    _, out, _ = pull(hub, tmp_path)
    weights = Path(out) / "model.safetensors"
    weights.resolve().write_bytes(WEIGHTS[:-1] + b"?")
    code, _, err = pull(hub, tmp_path)
    assert code == 2 and "model.safetensors has SHA-256" in err
    assert pull(hub, tmp_path)[0] == 0 and weights.read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "Hugging Face refuses it (401): set HF_TOKEN to a token"),
        (404, "no such repository on Hugging Face, or a token is required"),
    ],
)
def test_a_refusal_says_what_was_tried(hub, tmp_path, status, message):
    hub.status = status
    code, out, err = pull(hub, tmp_path)
    assert code == 2 and not out and message in err


def test_a_cached_model_is_found_while_the_hub_is_away(hub, tmp_path):
    assert pull(hub, tmp_path)[0] == 0
    hub.status = 503
    code, out, err = pull(hub, tmp_path)
    assert code == 0, err
    check_whole(out)
    hub.url = "http://127.0.0.1:9"
    code, out, err = pull(hub, tmp_path)
    assert code == 0, err
    check_whole(out)


def test_a_full_disk_is_named(hub, tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    code, _, err = pull(hub, tmp_path, preexec_fn=limit)
    assert code == 2 and "not enough disk space" in err and "HF_HOME" in err


def test_two_pulls_at_once_fetch_once(hub, tmp_path):
    both = [start_pull(hub, tmp_path) for _ in range(2)]
    outs = [process.communicate(timeout=120)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0] and outs[0] == outs[1]
    check_whole(outs[0])
    assert hub.sent_bytes == len(WEIGHTS)
