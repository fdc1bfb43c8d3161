"""Weights streamed from a file: the resident engine's bits in every family, what is refused before
anything is loaded, and what happens where a file is half, shorter or cannot be read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.api.errors import ConfigError, EngineDead
from octavo.executor.native.extension import native_module
from octavo.executor.native.weight_file import (
    check_directory,
    get_file_system,
    read_index,
    writing,
)
from tests.support.llm_tools import (
    GREEDY,
    PENALISED,
    SAMPLED,
    make_llm,
    prompts_of,
)
from tests.support.native_harness import require_native
from tests.support.streamed_models import least_bytes, results, streamed
from tests.support.tiny_models import tiny_model

PARAMS = [GREEDY, SAMPLED, PENALISED, GREEDY]
PROMPTS = prompts_of(5, 40, 33, 90)
FAMILIES = ("llama", "gpt2", "gpt_oss", "deepseek_v3", "bloom")
"""Families that between them have tied and untied heads, experts, heads' own products and biases.
"""


@pytest.fixture(scope="module", autouse=True)
def native():
    require_native()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_weights_give_the_resident_engines_bits(family, directory):
    with make_llm(model_path=tiny_model(family).path, backend="native") as llm:
        expected = results(llm, PROMPTS, PARAMS)
    least = least_bytes(directory, family)
    for options in ({}, {"weights_schedule": "layers"}, {"threads": 2}):
        with streamed(directory, least, family, **options) as llm:
            assert results(llm, PROMPTS, PARAMS) == expected
    with streamed(directory, 1 << 40, family) as llm:
        assert results(llm, PROMPTS, PARAMS) == expected


@pytest.mark.parametrize("precision", [{"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_packed_weights_stream_alike(precision, directory):
    options = precision | {"max_num_batched_tokens": 200}
    with make_llm(model_path=tiny_model("llama").path, backend="native", **options) as llm:
        expected = results(llm, PROMPTS, PARAMS)
    least = least_bytes(directory, **options)
    with streamed(directory, least + 8192, **options) as llm:
        assert results(llm, PROMPTS, PARAMS) == expected


def test_the_file_is_packed_once_and_bound_to_the_weights(directory):
    least = least_bytes(directory)
    streamed(directory, least).close()
    (path,) = directory.glob("*.weights")
    written = path.stat().st_mtime_ns
    streamed(directory, least + 8192).close()
    assert path.stat().st_mtime_ns == written
    streamed(directory, 1 << 40, quantization="int8").close()
    assert len(list(directory.glob("*.weights"))) == 2


def test_no_start_trusts_half_a_file(directory):
    """Leftovers of a killed process and damaged files are written again."""
    least = least_bytes(directory)
    with streamed(directory, least) as llm:
        expected = results(llm, PROMPTS, PARAMS)
    (path,) = directory.glob("*.weights")
    whole = path.read_bytes()
    path.unlink()
    path.with_suffix(".partial").write_bytes(whole[: len(whole) // 2])
    for damaged in (None, whole[: len(whole) // 2], whole[:-1], bytes(len(whole))):
        if damaged is not None:
            path.write_bytes(damaged)
        with streamed(directory, least) as llm:
            assert results(llm, PROMPTS, PARAMS) == expected
        assert path.read_bytes() == whole
        assert not path.with_suffix(".partial").exists()


def test_a_start_that_waited_for_one_that_failed_writes_a_file_of_its_own(directory, monkeypatch):
    """A third start cannot open the file that the second one writes."""
    path, key, waits = directory / "some.weights", bytes(32), threading.Event()
    lock = fcntl.flock

    def noted(file: Any, how: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            waits.set()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", noted)

    def write() -> None:
        with writing(path, key) as writer:
            assert writer is not None
            with path.with_suffix(".partial").open("rb") as other, pytest.raises(BlockingIOError):
                lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            writer.finish()

    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(ConfigError, match="No space left"), writing(path, key):
            second = threads.submit(write)
            assert waits.wait(30)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        second.result(timeout=30)
    assert read_index(path, key) == []
    with writing(path, key) as writer:
        assert writer is None
    assert list(directory.iterdir()) == [path]


def test_what_a_killed_start_has_left_is_no_reason_to_refuse_the_next(directory, monkeypatch):
    path, usage = directory / "some.weights", namedtuple("usage", "total used free")
    path.with_suffix(".partial").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 4096))
    check_directory(directory, path, 1 << 20)
    with pytest.raises(ConfigError, match=r"has 1\.0 MiB free, requires 2\.0 MiB"):
        check_directory(directory, path, 2 << 20)


def test_a_read_error_fails_the_steps_requests_and_no_later_ones(directory):
    with streamed(directory, least_bytes(directory)) as llm:
        expected = results(llm, PROMPTS, PARAMS)
        (path,) = directory.glob("*.weights")
        (number,) = (
            int(link.name)
            for link in Path("/proc/self/fd").iterdir()
            if link.is_symlink() and os.path.realpath(link) == str(path.resolve())
        )
        kept, (reader, writer) = os.dup(number), os.pipe()
        try:
            os.dup2(reader, number)
            where = rf"could not be read from {re.escape(str(path))} at byte \d+: Illegal seek"
            failed = llm.generate(PROMPTS, GREEDY)
            assert all(re.search(where, str(output.error)) for output in failed), failed
        finally:
            os.dup2(kept, number)
            for each in (kept, reader, writer):
                os.close(each)
        llm.generate([PROMPTS[0]], GREEDY)  # what was met while reading ahead is this step's
        assert results(llm, PROMPTS, PARAMS) == expected


def test_a_file_that_becomes_shorter_ends_the_engine(directory):
    with streamed(directory, least_bytes(directory)) as llm:
        results(llm, PROMPTS, PARAMS)
        (path,) = directory.glob("*.weights")
        os.truncate(path, 4096)
        with pytest.raises(EngineDead, match=r"the file of weights ends too early: .*at byte \d+"):
            results(llm, PROMPTS, PARAMS)


def test_a_start_that_cannot_read_the_file_says_so(directory, monkeypatch):
    """A file that becomes shorter behind its index, as the disk under it fails."""
    least = least_bytes(directory) + 65536
    streamed(directory, least).close()
    (path,) = directory.glob("*.weights")
    native = native_module()
    opened = native.WeightStream

    def shorter(*args: Any, **options: Any) -> Any:
        os.truncate(path, 8192)
        return opened(*args, **options)

    monkeypatch.setattr(native, "WeightStream", shorter)
    with pytest.raises(
        ConfigError, match=rf"weights_dir: .* too early: {path} at byte \d+\nhint: "
    ):
        streamed(directory, least)


def test_stats_say_what_was_read_and_waited_for(directory):
    """Each step asks for every streamed product once, and reads it once."""
    with make_llm(model_path=tiny_model("llama").path, backend="native") as llm:
        llm.generate([PROMPTS[0]], GREEDY)
        assert llm.get_metrics().weights.num_bytes == 0
    with streamed(directory, least_bytes(directory)) as llm:
        found = []
        for _ in range(2):
            llm.generate([PROMPTS[0]], GREEDY)
            found.append((llm.get_metrics().num_steps, llm.get_metrics().weights))
    (steps, first), (more_steps, second) = found
    asked = first.num_found + first.num_waited
    assert asked > steps > 0 and asked % steps == 0
    assert second.wait_s >= first.wait_s >= 0
    assert second.num_found + second.num_waited == asked * more_steps // steps
    assert second.num_bytes > first.num_bytes > 0


def test_files_without_direct_reads_are_read_through_the_cache():
    stream = native_module().WeightStream(
        "/dev/zero", [(0, 4096, 0)], [], memory_bytes=4096, num_threads=1, block_bytes=4096
    )
    assert not stream.is_direct


def test_a_directory_in_memory_is_refused(directory):
    mounts = directory.parent / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\ntmpfs {directory} tmpfs rw 0 0\n")
    assert get_file_system(directory / "below", mounts) == "tmpfs"
    assert get_file_system(Path("/elsewhere"), mounts) == "ext4"
    if get_file_system(Path("/dev/shm")) == "tmpfs":
        with pytest.raises(ConfigError, match="weights_dir: /dev/shm is on tmpfs"):
            streamed(Path("/dev/shm"), 1 << 40)


def test_a_full_directory_is_refused_with_what_is_needed(directory, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(ConfigError, match=r"has 0 B free, requires .*iB\nhint: free space"):
        streamed(directory, 1 << 40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_memory_bytes": 1 << 20}, "weights_memory_bytes: requires weights_dir"),
        ({"weights_dir": "x"}, "weights_dir: requires weights_memory_bytes"),
        (
            {"weights_schedule": "layers"},
            "weights_schedule: requires weights_memory_bytes",
        ),
        (
            {"weights_memory_bytes": 1 << 20, "weights_dir": "x", "backend": "reference"},
            "weights_memory_bytes: requires the native backend, got 'reference'",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_llm(model_path=tiny_model("llama").path, **{"backend": "native"} | options)
