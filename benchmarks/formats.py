"""Octavo beside llama.cpp on GGUF files of few bits, one stream, in turns: a random qwen3 of 0.5 G
parameters in each of the types asked for, which both read from the same file.

    python benchmarks/formats.py DIR --types Q2_K,Q3_K,IQ4_XS --rounds 5 \\
        --llamacpp PYTHON_WITH_XLLAMACPP
    python benchmarks/formats.py DIR --types MXFP4,NVFP4 --rounds 5 \\
        --engine 'llamacpp|{type}|{file}|{"binary": "PATH/llama-batched-bench"}'

DIR keeps the files, 0.2 GB each. An engine is given as in compare.py, with {type} and {file} where
they belong. Prints a JSON line per result and, last, a line for each type and peer: the medians,
and their ratio. Shapes are Qwen3-0.6B's, whose rows are whole blocks of every type, with a
vocabulary of 49,152; tables are in Q6_K. The numbers are seeded and say nothing. Three types take
about four minutes; needs the package gguf (extra `dev`).
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from compare import Engine, machine
from dense_1_6b import DenseShape, matrices, norms, write_header
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from octavo.quant.gguf import BLOCK_TYPES, BlockType

SHAPE = DenseShape(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, width=3072)
TABLES = ("token_embd.weight", "output.weight")
TABLE_TYPE = "Q6_K"
WIDTH = 0.02
"""Standard deviation of the weights."""
DRAWN_BLOCKS = 1 << 14
"""Blocks that are drawn; a matrix repeats them."""
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Places of the fp16 numbers in a type's blocks, which multiply all others of it."""
SCALE_BYTES = {"MXFP4": (1, 121), "NVFP4": (4, 24)}
"""Number and value of the bytes of scales that begin a block without fp16 numbers."""
BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}


def blocks_of(kind: BlockType, draw: np.random.Generator) -> NDArray[np.uint8]:
    """Draws blocks whose numbers are about WIDTH: `[DRAWN_BLOCKS, bytes]`."""
    if kind.name == "BF16":
        numbers = draw.normal(0, WIDTH, (DRAWN_BLOCKS, kind.block_size)).astype(np.float32)
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = draw.integers(0, 256, (DRAWN_BLOCKS, kind.block_bytes), np.uint8)
    if kind.name in SCALE_BYTES:
        count, value = SCALE_BYTES[kind.name]
        blocks[:, :count] = value
        return blocks
    _put(blocks, HALVES[kind.name], 1.0)
    shape = (DRAWN_BLOCKS, kind.block_size)
    spread = float(kind.tensor(blocks.reshape(-1), shape).dequantize().std())
    _put(blocks, HALVES[kind.name], WIDTH / spread)
    return blocks


def _put(blocks: NDArray[np.uint8], places: tuple[int, ...], value: float) -> None:
    for place in places:
        blocks[:, place : place + 2] = np.array([value], np.float16).view(np.uint8)


def write(path: Path, shape: DenseShape, type_of: Callable[[str], str]) -> None:
    """Writes a model of random numbers with each matrix in the type that `type_of` returns."""
    draw = np.random.default_rng(0)
    drawn: dict[str, NDArray[np.uint8]] = {}
    partial = path.with_suffix(".partial")
    writer = GGUFWriter(partial, "qwen3", use_temp_file=True)
    write_header(writer, shape)
    for tensor, (rows, inputs) in matrices(shape):
        own = type_of(tensor)
        if own not in drawn:
            drawn[own] = blocks_of(BY_NAME[own], draw)
        num_blocks = rows * inputs // BY_NAME[own].block_size
        blocks = np.resize(drawn[own], (num_blocks, BY_NAME[own].block_bytes)).reshape(rows, -1)
        writer.add_tensor(tensor, blocks, raw_dtype=GGMLQuantizationType[own])
    for tensor, width in norms(shape):
        writer.add_tensor(tensor, np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def engines(name: str, file: Path, llamacpp: str | None, others: list[str]) -> list[Engine]:
    """Returns Octavo and its peers on a file."""
    found = [f"octavo|{name}|{file}|{{}}"]
    if llamacpp is not None:
        found.append(f"xllamacpp|{name}|{file}|{{}}|{llamacpp}")
    found += [other.replace("{type}", name).replace("{file}", str(file)) for other in others]
    return [Engine.parse(each) for each in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--types", default="Q2_K,Q3_K,IQ4_XS")
    parser.add_argument("--llamacpp", help="a Python that has the package xllamacpp")
    parser.add_argument("--engine", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    args = parser.parse_args()
    allowed = (*HALVES, *SCALE_BYTES)
    names = args.types.split(",")
    if unknown := [name for name in names if name not in allowed]:
        parser.error(f"--types: got {unknown[0]}, expected {', '.join(allowed)}")
    args.directory.mkdir(parents=True, exist_ok=True)
    print(json.dumps({"machine": machine(), "requests": args.requests, "rounds": args.rounds}))
    seen: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for name in names:
        file = args.directory / f"{name}.gguf"
        if not file.exists():
            write(file, SHAPE, lambda tensor, own=name: TABLE_TYPE if tensor in TABLES else own)
        for turn in range(args.rounds):
            for engine in engines(name, file, args.llamacpp, args.engine):
                for result in engine.run(args.requests, args.prompt, args.output):
                    seen[name, engine.name, result["work"]].append(result["tokens_per_second"])
                    row = {"round": turn, "type": name, "engine": engine.name, **result}
                    print(json.dumps(row | {"at": time.strftime("%H:%M:%S")}), flush=True)
    for (name, engine_name, work), rates in seen.items():
        if work == "batch" and args.requests == 1:
            continue  # the same as one request alone
        median, own = statistics.median(rates), statistics.median(seen[name, "octavo", work])
        row = {"type": name, "engine": engine_name, "work": work, "median": median}
        row |= {"min": min(rates), "max": max(rates), "octavo_over_it": round(own / median, 3)}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
