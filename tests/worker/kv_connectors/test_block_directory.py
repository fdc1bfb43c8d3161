"""Blocks in files: a read gives what was written or nothing, the least recently used go, the pinned
stay, and engines share a directory.
"""

import errno
import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from octavo.api.errors import ConfigError
from octavo.engine.protocol.block_hashes import BlockHashing
from octavo.engine.protocol.kv_messages import BlockKey, BlockPin, SlotBlock
from octavo.worker.kv_connectors import block_file
from octavo.worker.kv_connectors.block_directory import BlockDirectory, DirectoryFull, open_root
from octavo.worker.kv_connectors.checksum import CHECKSUM
from octavo.worker.kv_connectors.fingerprint import DIGESTS, fingerprint

SIZE = 1000
MODEL = b"m" * 32
FILE_BYTES = (
    len(block_file.make_header(MODEL, 0, BlockKey(bytes(16), bytes(16), (0,) * 16), SIZE))
    + SIZE
    + CHECKSUM.size
)


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def directory(tmp_path, clock):
    return make(tmp_path, clock)


def make(
    root: Path, clock: Clock, *, num_files: float = 100, model: bytes = MODEL
) -> BlockDirectory:
    return BlockDirectory(root, model, max_bytes=int(num_files * FILE_BYTES), clock=clock)


def block(number: int, group: int = 0) -> SlotBlock:
    return SlotBlock(group, number, BlockHashing().block(bytes(16), (number,) * 16, 0))


def data(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def read(directory: BlockDirectory, number: int, group: int = 0):
    found = np.zeros(SIZE, np.uint8)
    return found if directory.read(block(number, group), found.data) else None


def write(directory: BlockDirectory, clock: Clock, *numbers: int) -> list:
    gone = []
    for number in numbers:
        clock.now += 100
        gone += directory.write(block(number), data(number).data)
        set_time(directory, number, clock.now)
    return gone


def set_time(directory: BlockDirectory, number: int, when: float) -> None:
    os.utime(path_of(directory, number), (when, when))


def path_of(directory: BlockDirectory, number: int) -> Path:
    return directory.get_path(block(number).name)


def there(directory: BlockDirectory) -> set[int]:
    return {number for number in range(50) if path_of(directory, number).exists()}


def test_what_is_written_is_read_by_another_engine(directory, tmp_path, clock):
    write(directory, clock, 1, 2)
    directory.write(block(1, group=1), data(9).data)
    other = make(tmp_path, clock)
    assert set(other.look().found) == {block(1).name, block(2).name, block(1, 1).name}
    np.testing.assert_array_equal(read(other, 1), data(1))
    np.testing.assert_array_equal(read(other, 2), data(2))
    np.testing.assert_array_equal(read(other, 1, group=1), data(9))
    assert read(other, 3) is None


def test_another_models_blocks_are_not_found(directory, tmp_path, clock):
    write(directory, clock, 1)
    other = make(tmp_path, clock, model=b"o" * 32)
    assert other.look().found == [] and read(other, 1) is None
    path_of(other, 1).parent.mkdir(exist_ok=True)
    path_of(directory, 1).rename(path_of(other, 1))
    assert read(other, 1) is None and other.stored().num_damaged == 1, "its header says so"


def test_a_collision_of_digests_is_a_miss(directory, clock):
    write(directory, clock, 1)
    other = block(1)
    other.key = other.key._replace(token_ids=(7,) * 16)
    assert not directory.read(other, np.zeros(SIZE, np.uint8).data)


def damage(path: Path, how: str, place: float) -> None:
    raw = bytearray(path.read_bytes())
    index = min(int(len(raw) * place), len(raw) - 1)
    if how == "flip":
        raw[index] ^= 0x10
    elif how == "truncate":
        del raw[index:]
    elif how == "grow":
        raw += b"x"
    else:
        raw[index : index + 200] = bytes(len(raw[index : index + 200]))
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["flip", "truncate", "grow", "zero"])
@pytest.mark.parametrize("place", [0, 0.02, 0.1, 0.5, 0.9, 1])
def test_a_damaged_file_is_a_miss_reported_and_removed(directory, clock, caplog, how, place):
    write(directory, clock, 1)
    damage(path_of(directory, 1), how, place)
    assert read(directory, 1) is None
    assert directory.stored().num_damaged == 1
    assert "removed from the prefix cache" in caplog.text
    assert there(directory) == set()


def test_the_least_recently_used_go_first(tmp_path, clock):
    directory = make(tmp_path, clock, num_files=10)
    write(directory, clock, *range(10))
    clock.now += 1000
    directory.touch(block(0).name)
    directory.touch(block(3).name)
    gone = write(directory, clock, 10)
    assert set(gone) == {block(1).name, block(2).name}, "a tenth of the size is made free"
    assert there(directory) == {0, *range(3, 11)}
    assert directory.stored().num_bytes == 9 * FILE_BYTES


def test_pinned_blocks_stay_until_their_time(tmp_path, clock):
    directory = make(tmp_path, clock, num_files=5)
    write(directory, clock, *range(5))
    directory.pin([BlockPin(block(number).name, clock.now + 10_000) for number in (0, 20)])
    assert directory.stored().pinned_bytes == FILE_BYTES
    directory.write(block(20), data(20).data)
    write(directory, clock, *range(5, 12))
    assert {0, 20} <= there(directory), "the one that was pinned before it came, too"
    again = make(tmp_path, clock, num_files=5)
    again.look()
    assert again.stored().pinned_bytes == 2 * FILE_BYTES, "pins outlive the engine"
    again.pin([BlockPin(block(20).name, 0)])
    clock.now += 20_000
    write(again, clock, *range(30, 36))
    assert not {0, 20} & there(directory)


def test_a_pin_holds_though_its_block_is_written_again_or_was_damaged(directory, tmp_path, clock):
    write(directory, clock, 1)
    directory.pin([BlockPin(block(1).name, clock.now + 10_000)])
    other = make(tmp_path, clock)
    assert other.look().pinned == [BlockPin(block(1).name, clock.now + 10_000)]
    directory.write(block(1), data(1).data)
    other.write(block(1), data(1).data)
    assert path_of(directory, 1).stat().st_mtime == clock.now + 10_000
    damage(path_of(directory, 1), "flip", 0.5)
    assert read(directory, 1) is None
    directory.pin([BlockPin(block(1).name, clock.now + 10_000)])
    directory.write(block(1), data(1).data)
    directory.look()
    assert (
        directory.stored().pinned_bytes == FILE_BYTES
        and directory.stored().foreign_pinned_bytes == 0
    )
    stranger = make(tmp_path, clock, model=b"s" * 32)
    assert stranger.look().pinned == [] and stranger.stored().foreign_pinned_bytes == FILE_BYTES


def test_a_directory_that_is_removed_is_made_again(directory, tmp_path, clock):
    write(directory, clock, 1)
    for entry in tmp_path.iterdir():
        shutil.rmtree(entry)
    assert read(directory, 1) is None
    with pytest.raises(FileNotFoundError):
        directory.write(block(2), data(2).data)
    assert directory.look().gone == [block(1).name] and directory.stored().num_write_errors == 1
    write(directory, clock, 2)
    np.testing.assert_array_equal(read(directory, 2), data(2))


def test_where_all_is_pinned_nothing_more_is_written(tmp_path, clock):
    directory = make(tmp_path, clock, num_files=3)
    write(directory, clock, 0, 1, 2)
    for number in range(3):
        directory.pin([BlockPin(block(number).name, clock.now + 10_000)])
    with pytest.raises(DirectoryFull):
        directory.write(block(3), data(3).data)
    assert there(directory) == {0, 1, 2}


def test_two_engines_share_a_directory_and_its_size(tmp_path, clock):
    one, other = make(tmp_path, clock, num_files=10), make(tmp_path, clock, num_files=10)
    write(one, clock, *range(6))
    write(other, clock, *range(20, 26))
    assert len(there(one)) == 12, "neither has looked since"
    changes = one.look()
    assert len(there(one)) == 9 and set(changes.gone) == {
        block(0).name,
        block(1).name,
        block(2).name,
    }
    assert set(changes.found) == {block(number).name for number in range(20, 26)}
    assert read(other, 0) is None and read(other, 5) is not None
    other.touch(block(0).name)
    other.remove(block(1).name)
    assert set(other.look().found) == {block(number).name for number in (3, 4, 5)}
    write(other, clock, 3)
    np.testing.assert_array_equal(read(one, 3), data(3))


def test_both_may_write_the_same_block(tmp_path, clock):
    one, other = make(tmp_path, clock), make(tmp_path, clock)
    write(one, clock, 1)
    write(other, clock, 1)
    one.look()
    assert one.stored().num_bytes == other.stored().num_bytes == FILE_BYTES
    np.testing.assert_array_equal(read(one, 1), data(1))


def test_a_file_left_half_written_is_removed_once_no_engine_can_be_writing_it(
    tmp_path, clock, caplog
):
    clock.now = os.stat(tmp_path).st_mtime
    directory = make(tmp_path, clock)
    torn = tmp_path / "tmp" / "99-1-0"
    torn.write_bytes(b"OCTAVOKV")
    directory.look()
    assert torn.exists(), "another engine may be at it"
    clock.now += 120
    directory.look()
    assert not torn.exists() and "left incomplete" in caplog.text


def test_removing_all_leaves_other_models_alone(directory, tmp_path, clock):
    other = make(tmp_path, clock, model=b"o" * 32)
    write(directory, clock, 1, 2)
    write(other, clock, 1)
    directory.remove_all()
    assert there(directory) == set() and there(other) == {1}
    assert directory.stored().num_bytes == FILE_BYTES


def test_a_disk_that_refuses_leaves_nothing_behind(directory, clock, tmp_path, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match="No space left"):
        directory.write(block(1), data(1).data)
    monkeypatch.undo()
    assert directory.stored().num_write_errors == 1
    assert there(directory) == set() and not list((tmp_path / "tmp").iterdir())
    write(directory, clock, 1)
    assert read(directory, 1) is not None


def test_a_full_disk(small_disk, clock):
    directory = make(small_disk, clock, num_files=1000)
    written = []
    with pytest.raises(OSError, match="No space left"):
        for number in range(200):
            write(directory, clock, number)
            written.append(number)
    assert len(written) > 3 and not list((small_disk / "tmp").iterdir())
    for number in written:
        np.testing.assert_array_equal(read(directory, number), data(number))


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError,
        match=r"prefix_cache_dir: cannot write to .*/file/cache: Not a directory",
    ):
        open_root(str(tmp_path / "file" / "cache"))


def test_the_fingerprint_is_that_of_the_weights_and_of_all_else(tmp_path):
    weights = tmp_path / "weights"
    weights.write_bytes(b"abc")
    first = fingerprint({"a": 1}, [weights], cache=tmp_path)
    assert fingerprint({"a": 1}, [weights], cache=tmp_path) == first
    assert fingerprint({"a": 2}, [weights], cache=tmp_path) != first
    (tmp_path / DIGESTS).write_text("not JSON")
    assert fingerprint({"a": 1}, [weights], cache=tmp_path) == first
    moved = tmp_path / "elsewhere"
    weights.rename(moved)
    assert fingerprint({"a": 1}, [moved], cache=tmp_path) == first, "contents count, not places"
    moved.write_bytes(b"abd")
    os.utime(moved, (1, 1))
    assert fingerprint({"a": 1}, [moved], cache=tmp_path) != first


def test_a_file_of_an_older_format_is_no_hit(tmp_path):
    """Version 1 had no digests of media, and other names."""
    directory = make(tmp_path, Clock())
    wanted = block(3)
    directory.write(wanted, memoryview(data(3)))
    (path,) = (tmp_path / MODEL.hex()[:32]).rglob("*.kv")
    key = wanted.key
    numbers = struct.pack("<8sIIIQ", block_file.MAGIC, 1, 0, len(key.token_ids), SIZE)
    token_ids = struct.pack(f"<{len(key.token_ids)}i", *key.token_ids)
    old = numbers + MODEL + key.digest + key.parent + token_ids + data(3).tobytes()
    path.write_bytes(old + struct.pack("<I", zlib.crc32(old)))
    assert not directory.read(wanted, memoryview(np.zeros(SIZE, np.uint8)))
    assert not path.exists(), "it is removed"


def test_a_block_with_media_is_stored_under_their_digests(tmp_path):
    directory = make(tmp_path, Clock())
    token_ids = (7,) * 16
    blocks = [
        SlotBlock(0, 0, BlockHashing(media={0: media}).block(bytes(16), token_ids, 0))
        for media in ((), (b"cat",), (b"cat", b"dog"))
    ]
    for number, wanted in enumerate(blocks):
        directory.write(wanted, memoryview(data(number)))
    for number, wanted in enumerate(blocks):
        found = np.zeros(SIZE, np.uint8)
        assert directory.read(wanted, memoryview(found))
        assert np.array_equal(found, data(number))
    one = SlotBlock(0, 0, blocks[1].key._replace(extra=()))
    assert not directory.read(one, memoryview(np.zeros(SIZE, np.uint8))), "the header differs"
