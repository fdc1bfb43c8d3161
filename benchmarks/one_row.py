"""Rate at which products of one row read weights, beside a plain read of the same bytes.

    python benchmarks/one_row.py [--shapes 1.7b 4b 8b] [--formats Q4_K Q6_K ...] [--levels avx2]

Decoding one stream multiplies one row with every weight, so memory bounds it if the kernel is fast
enough. For the widths of each shape's products, tiles of each format fill --megabytes of memory;
all threads read their parts in a plain loop, then multiply a row with them, in turns for --rounds
rounds. Prints one JSON line for each level, shape, width and format: bytes per second of both
(medians), and the median of the rounds' ratios. Run it on a quiet machine; the defaults take about
two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from octavo.executor.native.extension import native_module, supported_levels
from octavo.executor.native.formats import FORMATS, TileFormat
from octavo.executor.native.row_rates import stream_rounds

WIDTHS = {"1.7b": (2048, 6144), "4b": (2560, 9728), "8b": (4096, 12288)}
"""Inputs of the attention's and the feed-forward's products, of each Qwen3 shape."""

DEFAULT_FORMATS = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "I8", "BF16")


def measure(
    device: Any, tiles: TileFormat, width: int, args: argparse.Namespace
) -> dict[str, float]:
    rounds = stream_rounds(device, tiles, width, round(args.megabytes * 2**20), args.rounds)
    reads, products = zip(*rounds, strict=True)
    return {
        "read_gb_per_s": round(statistics.median(reads) / 1e9, 2),
        "product_gb_per_s": round(statistics.median(products) / 1e9, 2),
        "of_read": round(statistics.median(b / a for a, b in rounds), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="*", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(DEFAULT_FORMATS))
    parser.add_argument("--levels", nargs="*", default=supported_levels()[-1:])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=float, default=128)
    args = parser.parse_args()
    for level in args.levels:
        native = native_module()
        device = native.Device(args.threads, str(Path(native.__file__).parent), level)
        for shape in args.shapes:
            for width in WIDTHS[shape]:
                for name in args.formats:
                    tiles = FORMATS[name]
                    row = {"level": level, "shape": shape, "inputs": width, "format": name}
                    print(json.dumps(row | measure(device, tiles, width, args)), flush=True)


if __name__ == "__main__":
    main()
