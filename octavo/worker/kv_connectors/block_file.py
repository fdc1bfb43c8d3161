"""One KV block as a file: what it is, its bytes, a checksum. It is written whole under another name
first, so that a crash leaves none half done.

    magic 8 | version, group, tokens, extras u32 | bytes u64 | fingerprint 32 | digest 16 | parent
    16 | token ids i32 | each extra: bytes u32, digest | the block | xxh3 u64

All numbers are little-endian. The fingerprint is that of the model and of all else that a block's
bytes depend on (`fingerprint.py`); the extras are digests of the media in the block. The checksum
finds damage, not malice: every program that may write into the directory is trusted.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from octavo.engine.protocol.kv_messages import BlockKey
from octavo.worker.kv_connectors.checksum import CHECKSUM, checksum_of

MAGIC = b"OCTAVOKV"
VERSION = 3
"""Version of this format and of how blocks are named; part of the fingerprint."""


class DamagedFile(Exception):
    """A file is not the block that its name says, or not whole."""


def header_of(fingerprint: bytes, group: int, key: BlockKey, num_bytes: int) -> bytes:
    """Returns all that comes before the block; what is read is compared with it."""
    count = len(key.token_ids)
    numbers = struct.pack("<8sIIIIQ", MAGIC, VERSION, group, count, len(key.extra), num_bytes)
    token_ids = struct.pack(f"<{count}i", *key.token_ids)
    extra = b"".join(struct.pack("<I", len(digest)) + digest for digest in key.extra)
    return numbers + fingerprint + key.digest + key.parent + token_ids + extra


def write_block_file(path: Path, temporary: Path, header: bytes, data: memoryview) -> int:
    """Writes a block; returns how many bytes the file has. OSError if it cannot be written, and
    then nothing of it is left.
    """
    try:
        with open(temporary, "wb", buffering=0, opener=_open_private) as file:
            num_bytes = 0
            for part in (header, data, CHECKSUM.pack(checksum_of(header, data))):
                num_bytes += _write(file.fileno(), memoryview(part))
        path.parent.mkdir(exist_ok=True)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return num_bytes


def read_block_file(path: Path, header: bytes, into: memoryview) -> None:
    """Reads a block's bytes; DamagedFile where the file is not that block, whole, FileNotFoundError
    where there is none.
    """
    with path.open("rb", buffering=0) as file:
        size, wanted = os.fstat(file.fileno()).st_size, len(header) + len(into) + CHECKSUM.size
        if size != wanted:
            raise DamagedFile(f"it has {size} bytes, should have {wanted}")
        if _read(file.fileno(), len(header)) != header:
            raise DamagedFile("its header is not that of the block it is named after")
        _read_into(file.fileno(), into)
        (checksum,) = CHECKSUM.unpack(_read(file.fileno(), CHECKSUM.size))
    if checksum != checksum_of(header, into):
        raise DamagedFile("its checksum is wrong")


def _open_private(path: str, flags: int) -> int:
    # Prompts can be read from these files.
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
            raise DamagedFile("it ends early")
        done += count
