from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo.worker.kv_connectors.block_directory import open_root
from octavo.worker.kv_connectors.fingerprint import DIGESTS, fingerprint


def test_many_engines_of_one_process_may_start_at_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"weights")

    def start(number: int) -> bytes:
        (tmp_path / f"{number}.bin").write_bytes(b"weights")
        return fingerprint(
            {"dtype": "bf16"}, [weights, tmp_path / f"{number}.bin"], cache=open_root(str(cache))
        )

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(start, range(200)))
    assert len(set(found)) == 1
    assert str(weights) in json.loads((cache / DIGESTS).read_text())
    assert [path.name for path in cache.iterdir()] == [DIGESTS]


def test_it_names_the_weights_contents_and_all_else(tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"weights")
    first = fingerprint({"dtype": "bf16"}, [weights], cache=tmp_path)
    assert first == fingerprint({"dtype": "bf16"}, [weights], cache=tmp_path)
    assert first != fingerprint({"dtype": "int8"}, [weights], cache=tmp_path)
    weights.write_bytes(b"weights!")
    assert first != fingerprint({"dtype": "bf16"}, [weights], cache=tmp_path)
