"""The script that measures tiles, over tiny shapes: it writes a table whose rows count before those
for any device.
"""

import importlib.util
from pathlib import Path

import pytest

from octavo.executor.torch.triton import tuning
from octavo.executor.torch.triton.device import device_name
from octavo.executor.torch.triton.tuning import TunedLaunch, read, write

pytestmark = (
    pytest.mark.slow
)  # Triton's interpreter takes its time; test_models.py and test_rows.py always run

SCRIPT = Path(__file__).parents[4] / "benchmarks" / "tune_triton.py"


def test_it_writes_rows_for_this_device(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("tune_triton", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "RUNS", 1)
    small = {
        "decode_attention": {"BLOCK_M": (16,), "BLOCK_N": (32, 64)},
        "prefill_attention": {"BLOCK_M": (16,), "BLOCK_N": (32,)},
        "packed_linear": {"BLOCK_N": (64,), "BLOCK_B": (32,), "SPLITS": (1, 2)},
        "pick": {"BLOCK": (128,), "PIVOTS": (4,)},
    }
    monkeypatch.setattr(script, "CANDIDATES", small)
    path, old = (
        tmp_path / "tuned.json",
        TunedLaunch("decode_attention", "*", {}, {"BLOCK_M": 16, "BLOCK_N": 64}),
    )
    write(path, [old])
    tiny = (
        "--widths 16 --groups 2 --kv int8 --contexts 20 --requests 2 --matrices 48x96 --bits 4,8"
        " --vocabularies 100"
    )
    script.main([*tiny.split(), "--output", str(path)])
    made = read(path)
    assert old in made and len(made) == 6
    device, shape = device_name(script.DEVICE), {"width": 16, "group": 2, "kv": "int8"}
    assert {(row.kernel, row.device) for row in made if row.shape == shape} == {
        (kernel, device) for kernel in list(small)[:2]
    }
    products = [
        {"outputs": 48, "row_bytes": 48, "bits": 4, "group": 32},
        {"outputs": 48, "row_bytes": 96, "bits": 8, "group": 96},
    ]
    assert [row.shape for row in made if row.kernel == "packed_linear"] == products
    assert capsys.readouterr().out.count('"ms"') == 5
    monkeypatch.setattr(tuning, "table", lambda: made)
    tuning.best_row.cache_clear()
    assert tuning.tuned("prefill_attention", device, **shape)["BLOCK_N"] == 32
    tuning.best_row.cache_clear()
