"""`octavo replay FILE`, in a process of its own as in the one that recorded."""

import json

import pytest


@pytest.fixture
def log(tmp_path, octavo, tiny):
    path = tmp_path / "log.jsonl"
    ended = octavo("run", "hello", "--max-tokens=5", f"--record={path}", *tiny)
    assert ended.code == 0, ended.err
    return path


def test_the_same_plans(octavo, log):
    ended = octavo("replay", log)
    assert ended.code == 0 and ended.err == ""
    assert ended.out.endswith("every plan is the same\n") and "1 requests" in ended.out


def test_the_same_tokens(octavo, log):
    ended = octavo("replay", log, "--execute")
    assert ended.code == 0 and ended.out.endswith("every plan and every result is the same\n")


def test_another_plan(octavo, log):
    lines = log.read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if json.loads(line)["type"] == "Planned")
    changed = json.loads(lines[index])
    changed["plan"]["rows"][0]["num_tokens"] += 1
    log.write_text("\n".join([*lines[:index], json.dumps(changed), *lines[index + 1 :]]) + "\n")
    ended = octavo("replay", log)
    assert ended.code == 1 and "step 0: rows was " in ended.out and "not the same" in ended.out


def test_no_recording(octavo, tmp_path):
    (tmp_path / "log").write_text("{}\n")
    ended = octavo("replay", tmp_path / "log")
    assert ended.code == 2 and "no recording" in ended.err and "hint: `octavo serve --record FILE`" in ended.err
