"""What each way to store a model's weights costs and brings: the table of
docs/guides/quantization.md.

    python benchmarks/quantized.py DIRECTORY --prepare
    python benchmarks/quantized.py DIRECTORY [--only FP16,INT8,INT4,RTN]

The model is SmolLM2 with its channels in another order, since its own file is of 4 bits already and
rounding would find their grid again. The first command writes it to DIRECTORY, cuts Newton's
Opticks into the five windows that are judged and the text behind them, which calibrates, and
quantises every way: about half an hour of one core, which goes on where it was stopped and may run
beside other work. The second measures on a quiet machine, about half a minute a row; rows of an
earlier run stand. Prints the rows as a table in Markdown.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.open import open_checkpoint
from octavo.config.sizes import format_bytes
from octavo.text.tokenizer import load_tokenizer
from octavo.tools.quantize import write_tokenizer
from tests.support.shuffled_model import write_shuffled

BOOK = Path(__file__).parent.parent / "tests" / "data" / "opticks.txt"
WINDOW, NUM_WINDOWS = 1024, 5
CALIBRATION_TEXTS = 15
ROWS = "FP16,INT8,INT4,RTN,GPTQ,AWQ,W8A8,GGUF-4,GGUF-6,GGUF-8"


def write_work(directory: Path) -> None:
    """Writes the model with its tokenizer, and the two parts of the book, unless they are there."""
    model = directory / "model"
    if (directory / "calibration.txt").exists():
        return
    model.mkdir(parents=True, exist_ok=True)
    source = open_checkpoint(resolve("smollm2")).tokenizer_source()
    assert source is not None
    write_shuffled(model)
    write_tokenizer(source, model)
    tokenizer = load_tokenizer(source)
    ids = tokenizer.encode(BOOK.read_text(encoding="utf-8"), add_special_tokens=False)
    parts = {
        "judged.txt": ids[: WINDOW * NUM_WINDOWS],
        "calibration.txt": ids[WINDOW * NUM_WINDOWS :],
    }
    for name, part in parts.items():
        (directory / name).write_text(tokenizer.decode(part), encoding="utf-8")


def bench(directory: Path, only: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli.main", "bench", "quant", str(directory / "model")]
    command += ["--text", str(directory / "judged.txt"), "--windows", str(NUM_WINDOWS)]
    command += ["--calibration", str(directory / "calibration.txt")]
    command += ["--calibration-texts", str(CALIBRATION_TEXTS), "--calibration-length", str(WINDOW)]
    command += ["--made", str(directory / "made"), "--resume", "--only", only, *options]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)


def print_table(rows: list[dict[str, float | str]]) -> None:
    """Prints rows as a table in Markdown."""
    first = rows[0]
    print("| format | size | of FP16 | tokens/s | of FP16 | perplexity | rise |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        size, speed, rise = (
            float(row[name]) / float(first[name])
            for name in ("weight_bytes", "tokens_per_s", "perplexity")
        )
        print(
            f"| {row['name']} | {format_bytes(int(row['weight_bytes']))} | {size:.0%}"
            f" | {float(row['tokens_per_s']):,.0f} | {speed:.2f}"
            f" | {float(row['perplexity']):.3f} | {rise - 1:+.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prepare", action="store_true", help="quantise, and measure nothing")
    parser.add_argument("--only", default=ROWS)
    args = parser.parse_args()
    write_work(args.directory)
    if args.prepare:
        bench(args.directory, args.only, "--prepare")
        return
    print_table(json.loads(bench(args.directory, args.only, "--json").stdout)["rows"])


if __name__ == "__main__":
    main()
