"""Checksums of blocks: those of the algorithm's own description, and of bytes in several parts."""

import numpy as np

from octavo.worker.kv_connectors.checksum import get_checksum


def test_it_is_xxh3_with_64_bits():
    """Known answers of the reference implementation: no bytes, and one."""
    assert get_checksum(b"") == 0x2D06800538D394C2
    assert get_checksum(b"a") == 0xE6C632B61E964E1F


def test_parts_are_one_after_the_other():
    data = np.random.default_rng(1).integers(0, 256, 100_000, np.uint8)
    whole = get_checksum(data)
    assert get_checksum(data.tobytes()) == get_checksum(data.data) == whole
    assert get_checksum(data[:7].tobytes(), data[7:9000].data, data[9000:]) == whole
    assert get_checksum(data[:-1]) != whole
