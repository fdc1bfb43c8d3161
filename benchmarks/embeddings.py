"""Octavo beside other engines on embeddings: 1,000 sentences of 1 to 256 tokens at once, in turns,
each engine in its own process and environment.

    python benchmarks/embeddings.py DIR --rounds 3 \\
        --peer 'sentence_transformers|PYTHON' --peer 'onnxruntime|PYTHON' --peer 'openvino|PYTHON'

DIR is MiniLM as sentence-transformers saves it (`octavo pull minilm` prints it). All are in int8:
sentence-transformers in PyTorch's dynamic one, ONNX Runtime in its own, OpenVINO as nncf makes it.
PYTHON is an environment with what the engine's script (engines/NAME_embeddings.py) names; converted
models are kept in DIR-onnx and DIR-openvino. Prints a JSON line per result: texts a second, and the
least and the mean cosine to Octavo's rows in fp32. Two threads unless told otherwise. Nothing else
should run on the machine; a round takes about 20 seconds an engine.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ENGINES = Path(__file__).parent / "engines"
TEXT = (
    "light bends when it passes from air into glass and the colours part because each has its own"
    " angle a prism of clear glass shows them side by side on the wall of a dark room the red least"
    " the violet most and a second prism joins them again into white"
)


def sentences(count: int, most: int) -> list[str]:
    """Returns seeded texts, about evenly of 1 to `most` tokens."""
    draw, words = random.Random(0), TEXT.split()
    return [
        " ".join(draw.choice(words) for _ in range(1 + index * (most - 3) // count))
        for index in draw.sample(range(count), count)
    ]


def run(
    python: str, engine: str, model: str, texts: Path, threads: int, form: str = "int8"
) -> tuple[float, Path]:
    """Returns the texts a second, and the file of the embeddings."""
    out = texts.with_name(f"{engine}-{form}.npy")
    command = [python, str(ENGINES / f"{engine}_embeddings.py"), model, str(texts), str(out)]
    done = subprocess.run(
        [*command, str(threads), form],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{engine} failed:\n{done.stderr[-2000:]}")
    return float(lines[-1].removeprefix("RESULT ")), out


def cosines(found: Path, wanted: Path) -> dict[str, float]:
    a, b = np.load(found), np.load(wanted)
    each = (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return {
        "least_cosine": round(float(each.min()), 6),
        "mean_cosine": round(float(each.mean()), 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME|PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    engines = [("octavo", sys.executable), *(peer.split("|", 1) for peer in given.peer)]
    rates: dict[str, list[float]] = {name: [] for name, _ in engines}
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.json"
        texts.write_text(json.dumps(sentences(given.texts, 256)))
        _, wanted = run(sys.executable, "octavo", given.model, texts, given.threads, "float32")
        for _ in range(given.rounds):
            for name, python in engines:
                rate, found = run(python, name, given.model, texts, given.threads)
                rates[name].append(rate)
                line = {"engine": name, "texts_per_second": float(f"{rate:.4g}")}
                print(json.dumps(line | cosines(found, wanted)), flush=True)
    for name, each in rates.items():
        share = statistics.median(rates["octavo"]) / statistics.median(each)
        line = {"engine": name, "median": statistics.median(each), "octavo_over_it": share}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
