"""The work of an engine that makes embeddings: reads the texts, computes them once to warm up and
once for the clock, and writes the rows. The standard library and NumPy alone are needed, for each
engine has a virtual environment of its own.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np


def arguments() -> tuple[str, list[str], Path, int]:
    """Returns (model, texts, file of the embeddings, threads) from the command line."""
    model, texts, out, threads = sys.argv[1:5]
    return model, json.loads(Path(texts).read_text()), Path(out), int(threads)


def measure(embed: Callable[[list[str]], np.ndarray], texts: list[str], out: Path) -> None:
    """Prints one line `RESULT texts-a-second`, after a warm-up."""
    embed(texts[:64])
    began = time.perf_counter()
    rows = embed(texts)
    took = time.perf_counter() - began
    np.save(out, np.asarray(rows, np.float32))
    print(f"RESULT {len(texts) / took}", flush=True)
