"""`octavo replay --serve`: a recording's frames are what the live feed would have sent, whole or as
changes, and the page gets them in chunks.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys

import httpx
import pytest

from octavo.engine.recording.frames import RecordedFrames
from octavo.engine.recording.recorder import read_log
from octavo.server.recording_app import create_recording_app
from octavo.server.state.shown_recording import FRAMES_IN_CHUNK, ShownRecording
from tests.support.shown_recording import NUM_REQUESTS, requests, write_recording

NUM_BLOCKS = 96


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "shown.jsonl"
    write_recording(path, num_blocks=NUM_BLOCKS)
    return path


@pytest.fixture(scope="module")
def wholes(log):
    """Every frame as a snapshot."""
    return frames_of(log, num_in_chunk=1)


@pytest.fixture(scope="module")
def changes(log):
    """Every frame as the page gets it: a snapshot for each chunk, then changes."""
    return frames_of(log, num_in_chunk=FRAMES_IN_CHUNK)


def frames_of(log, *, num_in_chunk):
    header, events = read_log(log)
    return list(RecordedFrames(header, events, num_in_chunk=num_in_chunk))


def shown(log, *, max_frames=10_000):
    header, events = read_log(log)
    frames = RecordedFrames(header, events, num_in_chunk=FRAMES_IN_CHUNK)
    made = ShownRecording(log.name, frames, max_frames=max_frames)
    made.read()
    return made


def get(recording, path):
    async def ask():
        transport = httpx.ASGITransport(create_recording_app(recording))
        async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
            return await client.get(path)

    return asyncio.run(ask())


def cells(runs):
    return [(state, owner) for _, length, state, owner in runs for _ in range(length)]


def test_changes_laid_over_a_snapshot_make_the_next_snapshot(changes, wholes):
    assert len(changes) == len(wholes)
    for index, (change, whole) in enumerate(zip(changes, wholes, strict=True)):
        assert (change["type"] == "snapshot") == (index % FRAMES_IN_CHUNK == 0)
        if change["type"] == "snapshot":
            blocks, known = [(0, "")] * NUM_BLOCKS, {}
        for first, length, state, owner in change["groups"][0]["runs"]:
            blocks[first : first + length] = [(state, owner)] * length
        known = {name: one for name, one in known.items() if name not in change["gone"]}
        known |= {one["n"]: one for one in change["requests"]}
        assert blocks == cells(whole["groups"][0]["runs"])
        assert known == {one["n"]: one for one in whole["requests"]}


def test_every_step_and_every_token_is_in_a_frame(wholes):
    steps = [step for frame in wholes for step in frame["steps"]]
    assert [step[0] for step in steps] == sorted({step[0] for step in steps})
    written = sum(step[3] for step in steps)
    asked = sum(one.params.max_tokens for one in requests(NUM_REQUESTS))
    assert asked - NUM_REQUESTS <= written <= asked, "a prompt's last chunk draws the first token"
    times = [frame["time"] for frame in wholes]
    assert times == sorted(times) and wholes[-1]["requests"] == []


def test_the_counts_of_blocks_are_those_of_the_map(wholes):
    for frame in wholes:
        (group,) = frame["groups"]
        states = [state for state, _ in cells(group["runs"])]
        counts = group["counts"]
        assert [states.count(state) for state in range(4)] == [
            counts[name] for name in ("free", "cached", "held", "shared")
        ]


def test_the_recording_shows_what_a_student_is_to_see(wholes):
    """Waiting for two reasons, chunks beside decodes, shared and swapped blocks are all there."""
    assert {frame["queue"]["waits_for"] for frame in wholes} >= {"", "KV full"}
    assert any(step[2] and step[3] for frame in wholes for step in frame["steps"])
    assert any(frame["groups"][0]["counts"]["shared"] for frame in wholes)
    assert any(one["cached_tokens"] for frame in wholes for one in frame["requests"])


def test_the_page_finds_every_frame_in_chunks(log, changes):
    recording = shown(log)
    about = get(recording, "/v1/engine/recording").json()
    assert about == {
        "object": "recording",
        "file": "shown.jsonl",
        "num_frames": len(changes),
        "frames_in_chunk": FRAMES_IN_CHUNK,
        "is_complete": True,
        "problem": None,
    }
    num_chunks = -(-len(changes) // FRAMES_IN_CHUNK)
    chunks = [
        get(recording, f"/v1/engine/recording/{number}").json()["frames"]
        for number in range(num_chunks)
    ]
    assert [len(chunk) for chunk in chunks[:-1]] == [FRAMES_IN_CHUNK] * (num_chunks - 1)
    found = [frame for chunk in chunks for frame in chunk]
    assert found == json.loads(json.dumps(changes))


@pytest.mark.parametrize(("number", "status"), [("-1", 400), ("999", 400), ("a", 400)])
def test_a_chunk_that_is_not_there_is_refused(log, number, status):
    response = get(shown(log, max_frames=70), f"/v1/engine/recording/{number}")
    assert response.status_code == status
    said = "unable to parse" if number == "a" else "expected 0 to 1"
    assert said in response.json()["error"]["message"]


def test_the_page_is_sent_to_the_view_of_a_recording(log):
    recording = shown(log, max_frames=1)
    response = get(recording, "/")
    assert (response.status_code, response.headers["location"]) == (307, "/?recording")
    page = get(recording, "/?recording")
    assert page.status_code == 200 and "content-security-policy" in page.headers


def test_a_long_recording_is_cut_and_says_so(log):
    recording = shown(log, max_frames=70)
    assert recording.num_frames == 70 and recording.is_complete
    assert recording.problem.startswith("Only the first 70 steps are shown")


def test_a_recording_of_another_planner_ends_where_it_differs(log, tmp_path):
    lines = log.read_text().splitlines()
    planned = [i for i, line in enumerate(lines) if json.loads(line)["type"] == "StepPlanned"]
    changed = json.loads(lines[planned[20]])
    changed["plan"]["rows"][0]["num_tokens"] += 1
    lines[planned[20]] = json.dumps(changed)
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(lines) + "\n")
    recording = shown(other)
    assert recording.num_frames == 20
    assert "this version schedules different steps: step " in recording.problem


def test_the_command_serves_until_it_is_interrupted(log):
    command = [sys.executable, "-m", "octavo.cli.main", "replay", str(log), "--serve", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        page = httpx.get(url, follow_redirects=True)
        assert page.status_code == 200 and page.url.query == b"recording"
        assert httpx.get(f"{url}/v1/engine/recording").json()["file"] == log.name
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130)
