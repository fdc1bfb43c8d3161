"""What the server keeps on disk: ages, room, one server a folder, and what was damaged."""

import asyncio
import json
import sqlite3
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from octavo.api.errors import ConfigError
from octavo.server.state.store import (
    LineResult,
    Page,
    Record,
    Store,
    StoreLimits,
    get_file_path,
    open_store,
)
from tests.support.live_server import LiveServer, until
from tests.support.tiny_tokenizer import tiny_model_with_text

LIMITS = StoreLimits(ttl_s=3600, max_bytes=10_000)


@contextmanager
def opened(folder, limits=LIMITS):
    store = open_store(folder, limits)
    try:
        yield store
    finally:
        store.close()


def record(name, **fields):
    return Record(name, "response", "ada", {"text": "x"}, **fields)


def test_a_record_answers_to_its_owner_until_its_time_is_over(tmp_path):
    async def run(store):
        soon = int(time.time()) + 3600
        await store.add(record("kept", expires_at=soon))
        await store.add(record("unfinished"))
        await store.add(record("old", expires_at=int(time.time()) - 1))
        found = [await store.find("response", name, "ada") for name in ("kept", "unfinished")]
        assert [one.id for one in found] == ["kept", "unfinished"]
        assert await store.find("response", "old", "ada") is None
        assert await store.find("response", "kept", "bob") is None
        assert await store.find("file", "kept", "ada") is None
        page, has_more = await store.page("response", "ada", Page(10))
        assert [one.id for one in page] == ["unfinished", "kept"] and not has_more

    with opened(tmp_path) as store:
        asyncio.run(run(store))


def test_expired_records_and_their_files_leave_the_disk(tmp_path):
    """The next server on the folder deletes what has expired; unfinished work has no age."""
    with opened(tmp_path) as store:
        old = record("old", expires_at=int(time.time()) - 1, num_bytes=3)
        get_file_path(tmp_path, "old").write_bytes(b"abc")
        asyncio.run(store.apply(add=[old, record("unfinished")]))
    with opened(tmp_path) as store:
        unfinished = asyncio.run(store.unfinished("response"))
        assert [one.id for one in unfinished] == ["unfinished"]
        assert not get_file_path(tmp_path, "old").exists()
    rows = sqlite3.connect(tmp_path / "records.sqlite3").execute("SELECT id FROM records")
    assert rows.fetchall() == [("unfinished",)]


def test_a_full_store_answers_507_until_something_is_deleted(tmp_path):
    async def run(store):
        large = record("large", num_bytes=9_900)
        await store.add(large)
        with pytest.raises(HTTPException) as caught:
            store.check_room(200)
        assert caught.value.status_code == 507
        assert "of 10000 allowed, and 200 more were requested" in caught.value.detail
        store.check_room(50)
        await store.delete(large)
        store.check_room(10_000)

    with opened(tmp_path) as store:
        asyncio.run(run(store))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "replace", "delete"]), st.integers(0, 4)), max_size=25
    )
)
def test_the_bytes_that_are_counted_are_those_on_the_disk(tmp_path_factory, steps):
    """Whatever is stored, replaced and deleted, the room left is the same after a restart."""
    folder = tmp_path_factory.mktemp("store")

    def room(store):
        low, high = 0, LIMITS.max_bytes
        while low < high:
            middle = (low + high + 1) // 2
            try:
                store.check_room(middle)
                low = middle
            except HTTPException:
                high = middle - 1
        return low

    async def run(store):
        there = {}
        for what, number in steps:
            one = record(f"r{number}", num_bytes=number * 7)
            if what == "add" and number not in there:
                await store.add(one)
                there[number] = one
            elif what == "replace":
                body = {"text": "y" * number * 11}
                await store.replace(replace(one, body=body, num_bytes=number))
            elif what == "delete":
                assert await store.delete(one) == (there.pop(number, None) is not None)

    with opened(folder) as store:
        asyncio.run(run(store))
        before = room(store)
    with opened(folder) as store:
        assert room(store) == before


def test_the_first_outcome_of_a_line_counts(tmp_path):
    async def run(store):
        await store.add_line("b", LineResult(2, False, b"first"))
        await store.add_line("b", LineResult(2, True, b"second"))
        await store.add_line("b", LineResult(1, True, b"other"))
        assert await store.lines_done("b") == {1: True, 2: False}
        results = await store.line_results("b", after=0, limit=10)
        assert [(one.line, one.body) for one in results] == [(1, b"other"), (2, b"first")]
        assert [one.line for one in await store.line_results("b", after=1, limit=1)] == [2]

    with opened(tmp_path) as store:
        asyncio.run(run(store))


def test_a_second_server_on_the_same_folder_is_refused(tmp_path):
    """The folder is free again when the first has closed, or was killed."""
    with opened(tmp_path), pytest.raises(ConfigError) as caught:
        Store(tmp_path, LIMITS)
    assert caught.value.message == f"state_dir: another server uses {tmp_path}"
    assert "a separate --state-dir" in caught.value.hint
    with opened(tmp_path):
        pass


def test_a_second_server_ends_at_its_start_and_the_first_goes_on(tmp_path):
    model = str(tiny_model_with_text())
    first = LiveServer(model, f"--state-dir={tmp_path}")
    second = LiveServer(model, f"--state-dir={tmp_path}", wait=False)
    assert second.process.wait(60) == 2
    assert until(lambda: any("another server uses" in line for line in second.lines), 5)
    with first.http() as http:
        assert http.get("/v1/files").status_code == 200
    assert first.stop() == 0


@pytest.mark.parametrize(
    "bytes_left", [b"no database at all, but long enough" * 99, b"SQLite format"]
)
def test_a_damaged_database_ends_the_start_with_a_hint(tmp_path, bytes_left):
    """The folder is not held by a start that has failed, and the file is left as it was."""
    path = tmp_path / "records.sqlite3"
    path.write_bytes(bytes_left)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            open_store(tmp_path, LIMITS)
        assert caught.value.message.startswith(f"state_dir: cannot write to {tmp_path}")
        assert "--state-dir" in caught.value.hint
    assert path.read_bytes() == bytes_left


def test_a_database_that_is_damaged_while_it_is_used_answers_507(tmp_path):
    with opened(tmp_path) as store:
        asyncio.run(store.add(record("one")))
        sqlite3.connect(tmp_path / "records.sqlite3").executescript("DROP TABLE records")
        with pytest.raises(HTTPException) as caught:
            asyncio.run(store.find("response", "one", "ada"))
        assert caught.value.status_code == 507
        assert str(tmp_path) not in caught.value.detail


def test_a_newer_database_is_left_alone(tmp_path):
    with opened(tmp_path):
        pass
    database = sqlite3.connect(tmp_path / "records.sqlite3")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ConfigError) as caught:
        open_store(tmp_path, LIMITS)
    assert "written by a newer version" in caught.value.message


def test_files_that_no_record_names_are_removed_at_the_start(tmp_path):
    with opened(tmp_path):
        pass
    (tmp_path / "files" / "file-left").write_bytes(b"x")
    (tmp_path / "incoming" / "file-half").write_bytes(b"x")
    with opened(tmp_path):
        assert not list(tmp_path.rglob("file-*"))


def test_a_file_whose_bytes_are_gone_is_a_404_and_its_batch_fails(keeper, kept):
    """One that was removed from the disk hangs no batch and breaks no listing."""
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Hello", "max_tokens": 1},
    }
    content = json.dumps(line).encode()
    file = kept.files.create(file=("in.jsonl", content), purpose="batch")
    (option,) = [one for one in keeper.process.args if one.startswith("--state-dir=")]
    get_file_path(Path(option.removeprefix("--state-dir=")), file.id).unlink()
    with keeper.http() as http:
        assert http.get(f"/v1/files/{file.id}/content").status_code == 404
    batch = kept.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    assert until(lambda: kept.batches.retrieve(batch.id).status == "failed", 10)
    (fault,) = kept.batches.retrieve(batch.id).errors.data
    assert fault.code == "missing_file"
    kept.files.delete(file.id)
