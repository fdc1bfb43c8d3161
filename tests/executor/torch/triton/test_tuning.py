"""The table of tiles: which of its rows holds, and that every kernel has one for any device."""

import pytest

from octavo.executor.torch.triton import tuning
from octavo.executor.torch.triton.tuning import TunedLaunch, read, table, tuned, write


def test_every_kernel_has_a_row_for_any_device_and_shape():
    kernels = {row.kernel for row in table()}
    assert {row.kernel for row in table() if row.device == tuning.ANY and not row.shape} == kernels
    for kernel in kernels:
        assert tuned(kernel, "a device of next year", width=72) == tuned(kernel, "another")


def test_the_row_that_says_most_counts(monkeypatch):
    rows = (
        TunedLaunch("k", "*", {}, {"BLOCK": 1}),
        TunedLaunch("k", "*", {"width": 64}, {"BLOCK": 2}),
        TunedLaunch("k", "*", {"width": 64, "kv": "int8"}, {"BLOCK": 3}),
        TunedLaunch("k", "gpu", {}, {"BLOCK": 4}),
        TunedLaunch("k", "gpu", {"width": 64}, {"BLOCK": 5}),
        TunedLaunch("other", "gpu", {"width": 64, "kv": "int8"}, {"BLOCK": 6}),
    )
    monkeypatch.setattr(tuning, "table", lambda: rows)
    tuning.best_row.cache_clear()
    found = [tuned("k", *call, **shape)["BLOCK"] for call, shape in CALLS]
    tuning.best_row.cache_clear()
    assert found == [1, 2, 3, 4, 5, 5]


CALLS = [
    (("cpu",), {"width": 80, "kv": "int8"}),
    (("cpu",), {"width": 64, "kv": "bfloat16"}),
    (("cpu",), {"width": 64, "kv": "int8"}),
    (("gpu",), {"width": 80, "kv": "int8"}),
    (("gpu",), {"width": 64, "kv": "bfloat16"}),
    (("gpu",), {"width": 64, "kv": "int8"}),
]


def test_a_kernel_without_rows():
    with pytest.raises(KeyError, match="no row for the kernel nothing on gpu"):
        tuned("nothing", "gpu")


def test_what_is_written_is_read_and_a_later_row_counts(tmp_path):
    path = tmp_path / "table.json"
    write(
        path,
        [
            TunedLaunch("k", "*", {}, {"BLOCK": 1}),
            TunedLaunch("a", "gpu", {"width": 8}, {"BLOCK": 2}),
            TunedLaunch("k", "*", {}, {"BLOCK": 3}),
        ],
    )
    assert read(path) == (
        TunedLaunch("a", "gpu", {"width": 8}, {"BLOCK": 2}),
        TunedLaunch("k", "*", {}, {"BLOCK": 3}),
    )
    write(path, read(path))
    assert len(path.read_text().splitlines()) == 4
