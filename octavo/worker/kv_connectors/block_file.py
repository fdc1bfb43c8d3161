"""File format of one KV block: a header, its bytes, a checksum. It is written under a temporary
name first, so a crash leaves no incomplete file.

    magic 8 | version, group, tokens, extras u32 | bytes u64 | fingerprint 32 | digest 16 | parent
    16 | token ids i32 | each extra: bytes u32, digest | the block | xxh3 u64

All numbers are little-endian. The fingerprint covers the model and everything else that a block's
bytes depend on (`fingerprint.py`); the extras are digests of the media in the block. The checksum
detects damage, not malice: every program that may write into the directory is trusted.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from octavo.engine.protocol.kv_messages import BlockKey
from octavo.worker.kv_connectors.checksum import CHECKSUM, get_checksum

MAGIC = b"OCTAVOKV"
VERSION = 3
"""Version of this format and of block hashes; part of the fingerprint."""


class DamagedFile(Exception):
    """A file is incomplete or does not contain the expected block."""


def make_header(fingerprint: bytes, group: int, key: BlockKey, num_bytes: int) -> bytes:
    """Returns the header of a block, which is compared with the header of the file when reading."""
    count = len(key.token_ids)
    numbers = struct.pack("<8sIIIIQ", MAGIC, VERSION, group, count, len(key.extra), num_bytes)
    token_ids = struct.pack(f"<{count}i", *key.token_ids)
    extra = b"".join(struct.pack("<I", len(digest)) + digest for digest in key.extra)
    return numbers + fingerprint + key.digest + key.parent + token_ids + extra


def write_block_file(path: Path, temporary: Path, header: bytes, data: memoryview) -> int:
    """Writes a block; returns the file's size in bytes. Raises OSError if it cannot be written; no
    partial file remains.
    """
    try:
        with open(temporary, "wb", buffering=0, opener=_open_private) as file:
            num_bytes = 0
            for part in (header, data, CHECKSUM.pack(get_checksum(header, data))):
                num_bytes += _write(file.fileno(), memoryview(part))
        path.parent.mkdir(exist_ok=True)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return num_bytes


def read_block_file(path: Path, header: bytes, into: memoryview) -> None:
    """Reads a block's bytes. Raises DamagedFile if the file is not the complete block,
    FileNotFoundError if it does not exist.
    """
    with path.open("rb", buffering=0) as file:
        size, expected_size = (
            os.fstat(file.fileno()).st_size,
            len(header) + len(into) + CHECKSUM.size,
        )
        if size != expected_size:
            raise DamagedFile(f"it has {size} bytes, expected {expected_size}")
        if _read(file.fileno(), len(header)) != header:
            raise DamagedFile("its header does not match its name")
        _read_into(file.fileno(), into)
        (checksum,) = CHECKSUM.unpack(_read(file.fileno(), CHECKSUM.size))
    if checksum != get_checksum(header, into):
        raise DamagedFile("its checksum does not match")


def _open_private(path: str, flags: int) -> int:
    # Only the owner may read the files: they reveal prompts.
    return os.open(path, flags, 0o600)


def _write(file: int, part: memoryview) -> int:
    done = 0
    while done < len(part):
        done += os.write(file, part[done:])
    return done


def _read(file: int, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _read_into(file, memoryview(data))
    return bytes(data)


def _read_into(file: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = os.readv(file, [into[done:]])
        if count == 0:
            raise DamagedFile("it is truncated")
        done += count
