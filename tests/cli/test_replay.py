"""`octavo replay FILE` repeats a recording, also in another process than the one that recorded."""

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
    index = next(i for i, line in enumerate(lines) if json.loads(line)["type"] == "StepPlanned")
    changed = json.loads(lines[index])
    changed["plan"]["rows"][0]["num_tokens"] += 1
    log.write_text("\n".join([*lines[:index], json.dumps(changed), *lines[index + 1 :]]) + "\n")
    ended = octavo("replay", log)
    assert ended.code == 1 and "step 0: rows was " in ended.out and "not the same" in ended.out


def test_what_follows_another_plan_is_not_looked_at(octavo, log):
    """Without the recorded request its results fit no plan."""
    lines = log.read_text().splitlines()
    others = [line for line in lines if json.loads(line)["type"] != "RequestAdded"]
    log.write_text("\n".join(others) + "\n")
    ended = octavo("replay", log)
    assert (
        (ended.code, ended.err) == (1, "")
        and ended.out.count("step 0: ") == 1
        and "not the same: 1 found" in ended.out
    )


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 3], "step 0 has a result and no plan"),
        ([0, 1, 2, 3, 3], "step 0 has more results than steps"),
        ([0, 1, 2, 3, 0], "it starts twice"),
    ],
)
def test_lines_that_do_not_belong_together(octavo, log, order, message):
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[index] for index in order) + "\n")
    ended = octavo("replay", log)
    assert (ended.code, ended.message) == (2, [f"octavo: the recording is damaged: {message}"])


def test_a_plan_without_its_result_is_taken_for_one_that_was_in_flight(octavo, log):
    """The next plan is then made ahead of its result, unlike the recorded one, so they differ."""
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[index] for index in (0, 1, 2, 4, 5)) + "\n")
    ended = octavo("replay", log)
    assert (
        (ended.code, ended.err) == (1, "")
        and "step 1: rows was " in ended.out
        and "not the same: 1 found" in ended.out
    )


def test_rows_that_are_no_plans(octavo, log):
    lines = log.read_text().splitlines()
    result = json.loads(lines[3])
    result["result"]["rows"] = []
    log.write_text("\n".join([*lines[:3], json.dumps(result)]) + "\n")
    assert octavo("replay", log).message == [
        "octavo: the recording is damaged: step 0 has the result of another plan"
    ]


def test_bad_options(octavo, tiny, tmp_path, log):
    ended = octavo("replay", log, "--model=other")
    assert ended.message == [
        "octavo: model: got 'other', requires --execute or --serve",
        "hint: remove it: replaying plans alone loads no model",
    ]
    for flag, name in [
        ("--port=0", "port"),
        ("--host=::1", "host"),
        ("--max-steps=5", "max_steps"),
    ]:
        ended = octavo("replay", log, flag)
        assert ended.code == 2 and f"octavo: {name}: got" in ended.err
        assert "requires --serve" in ended.err
    ended = octavo("replay", log, "--serve", "--execute")
    assert ended.code == 2 and "octavo: serve: not supported with --execute" in ended.err
    for path, reason in [
        ("", "got an empty name"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none" / "log", "No such file"),
    ]:
        ended = octavo("run", "hello", f"--record={path}", *tiny)
        assert ended.code == 2 and "octavo: record: " in ended.err and reason in ended.err
        assert "KV cache" not in ended.err, "it is known before a model is loaded"


def test_no_recording(octavo, tmp_path):
    (tmp_path / "log").write_text("{}\n")
    ended = octavo("replay", tmp_path / "log")
    assert (
        ended.code == 2
        and "not a recording" in ended.err
        and "hint: create one with `octavo serve --record FILE`" in ended.err
    )
