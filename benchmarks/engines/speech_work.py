"""The work of an engine that hears: its options and WAV files from the command line, a warm-up on
the first file, then all files once for the clock. The standard library alone is needed, for each
engine has a virtual environment of its own.
"""

import json
import sys
import time
import wave
from collections.abc import Callable


def arguments() -> tuple[dict, list[str]]:
    """Returns the options and the files."""
    return json.loads(sys.argv[1]), sys.argv[2:]


def measure(hear: Callable[[list[str]], list[str]], files: list[str]) -> None:
    """Prints one line `RESULT {"rate": seconds of speech a second, "texts": ...}`."""
    hear(files[:1])
    began = time.perf_counter()
    texts = hear(files)
    took = time.perf_counter() - began
    heard = sum(_seconds(file) for file in files)
    rate = float(f"{heard / took:.4g}")
    print("RESULT " + json.dumps({"rate": rate, "texts": texts}), flush=True)


def _seconds(path: str) -> float:
    with wave.open(path) as file:
        return file.getnframes() / file.getframerate()
