"""The script that measures tiles, over tiny shapes: what it writes is a table that counts before the rows for any device."""

import importlib.util
from pathlib import Path

from octavo.backends.torch.triton import tuning
from octavo.backends.torch.triton.device import device_name
from octavo.backends.torch.triton.tuning import Row, read, write

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "tune_triton.py"


def test_it_writes_rows_for_this_device(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("tune_triton", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "RUNS", 1)
    small = {"decode_attention": {"BLOCK_M": (16,), "BLOCK_N": (32, 64)}, "prefill_attention": {"BLOCK_M": (16,), "BLOCK_N": (32,)}}
    monkeypatch.setattr(script, "CANDIDATES", small)
    path, old = tmp_path / "tuned.json", Row("decode_attention", "*", {}, {"BLOCK_M": 16, "BLOCK_N": 64})
    write(path, [old])
    script.main(f"--widths 16 --groups 2 --kv int8 --contexts 20 --requests 2 --output {path}".split())
    made = read(path)
    assert old in made and len(made) == 3
    device, shape = device_name(script.DEVICE), {"width": 16, "group": 2, "kv": "int8"}
    assert {(row.kernel, row.device) for row in made if row.shape == shape} == {(kernel, device) for kernel in small}
    assert capsys.readouterr().out.count('"ms"') == 2
    monkeypatch.setattr(tuning, "table", lambda: made)
    tuning._best.cache_clear()
    assert tuning.tuned("prefill_attention", device, **shape)["BLOCK_N"] == 32
    tuning._best.cache_clear()
