"""Fuzzes one target with atheris: `python -m tests.fuzz.run TARGET SECONDS` (see `make fuzz`).

Inputs that reach new code are kept in build/fuzz/TARGET. A finding is written to build/fuzz and
ends the run with its traceback.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["octavo", "starlette", "python_multipart"]):
    from tests.fuzz.targets import MAX_BYTES, MAX_S, TARGETS

ROOT = Path("build") / "fuzz"


def main(name: str, seconds: int) -> None:
    target = TARGETS[name]
    corpus = ROOT / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)

    def test(data: bytes) -> None:
        with contextlib.suppress(*target.refusals):
            target.run(data)

    limits = [f"-max_total_time={seconds}", f"-timeout={MAX_S:g}", f"-max_len={MAX_BYTES}"]
    atheris.Setup(
        [
            sys.argv[0],
            *limits,
            "-rss_limit_mb=4096",
            f"-artifact_prefix={ROOT}/{name}-",
            str(corpus),
        ],
        test,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
