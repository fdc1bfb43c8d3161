"""Octavo beside other engines on the shapes and formats that people run at home: Qwen3-1.7B, 4B and
8B of random numbers, in Q4_K_M, Q5_K_M, Q6_K, Q4_0, Q8_0, int8 and bf16.

    python benchmarks/home_models.py DIR --results FILE.jsonl --shapes 1.7b \\
        --engine 'octavo|{format}|{file}|{options}' \\
        --engine 'llamacpp|{format}|{file}|{"binary": "PATH_OF_LLAMA_BATCHED_BENCH"}' \\
        --engine 'openvino|{format}|{file}|{}|PYTHON_WITH_OPENVINO'

DIR keeps the files, of 1 to 17 GB each. An engine is given as in compare.py, with {shape},
{format}, {file} and {options} where they belong; {options} are Octavo's. An engine that reads no
GGUF file gets a directory of its own, and only the combinations for which it exists. Engines take
turns in each round, each in a process of its own. Results go to FILE, a JSON line each. What is
there already is not measured again, and no run is started after --minutes, so that the same command
goes on where it was stopped. `--table` prints the medians, and the rate of --own over each peer's.

Types of KV cache, in a shape whose cache is larger than its weights. Each engine has a second part
of its own, which becomes part of its name:

    python benchmarks/home_models.py DIR --results FILE.jsonl --shapes 135m --formats Q8_0 \\
        --cases context-16k context-32k \\
        --engine 'octavo|int8 KV|{file}|{"kv_cache_dtype": "int8"}' \\
        --engine 'octavo|int4 KV|{file}|{"kv_cache_dtype": "int4"}' \\
        --engine 'llamacpp|q4_0 KV|{file}|{"binary": "PATH", "arguments":
            ["-ctk", "q4_0", "-ctv", "q4_0", "-fa", "on"]}'
    python benchmarks/home_models.py DIR --results FILE.jsonl --table --own 'octavo, int4 KV'

| case | measured | tokens per second of |
|---|---|---|
| one stream, context-8k, -16k, -32k | a request of 128, 8,192, 16,128 or 32,512 tokens | decoding |
| 8 streams, 32 streams | as many requests of 128 tokens | prompts and answers |
| prompt-512, prompt-4096 | a request that makes one token | its prompt |

Nothing else should run on the machine. Needs the package gguf (extra `dev`).
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compare import Engine, machine
from dense_1_6b import DenseShape
from formats import TABLES, write

SHAPES = {
    "135m": DenseShape(
        hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, width=1536, tied=True
    ),
    "1.7b": DenseShape(vocabulary=151_936, tied=True),
    "4b": DenseShape(hidden=2560, layers=36, heads=32, width=9728, vocabulary=151_936, tied=True),
    "8b": DenseShape(hidden=4096, layers=36, heads=32, width=12_288, vocabulary=151_936),
    "tiny": DenseShape(hidden=256, layers=2, heads=2, kv_heads=2, width=512, vocabulary=40_960),
}
"""Qwen3's shapes by name. `135m` has SmolLM2's, whose rows are not whole blocks of K-quants; `tiny`
tests this script."""
FORMATS = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q4_0", "Q8_0", "int8", "bf16")


@dataclass(frozen=True)
class Case:
    requests: int
    prompt: int
    output: int
    work: str
    """What is measured: batch, prefill or decode (engines/work.py)."""


CASES = {
    "one stream": Case(1, 128, 64, "decode"),
    "8 streams": Case(8, 128, 32, "batch"),
    "32 streams": Case(32, 128, 32, "batch"),
    "prompt-512": Case(1, 512, 1, "prefill"),
    "prompt-4096": Case(1, 4096, 1, "prefill"),
    "context-8k": Case(1, 8192, 32, "decode"),
    "context-16k": Case(1, 16_128, 32, "decode"),
    "context-32k": Case(1, 32_512, 32, "decode"),
}


def type_of(form: str, shape: DenseShape, tensor: str) -> str:
    """Returns the type of a tensor in a file of a format, as llama.cpp's quantize chooses it."""
    if form in ("int8", "bf16"):
        return "BF16"
    if tensor in TABLES:
        is_output = tensor == "output.weight" or shape.tied
        return form if form == "Q8_0" else "Q6_K" if is_output else form.removesuffix("_M")
    if form.endswith("_M") and tensor.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, eighth = int(tensor.split(".")[1]), shape.layers // 8
        inner = eighth <= layer < 7 * shape.layers // 8
        if not inner or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return form.removesuffix("_M")


def file_of(directory: Path, shape: str, form: str) -> Path:
    """Returns the file of a format, which is written if it is missing."""
    stored = "bf16" if form == "int8" else form
    file = directory / f"qwen3-{shape}-{stored}.gguf"
    if not file.exists():
        write(file, SHAPES[shape], lambda tensor: type_of(form, SHAPES[shape], tensor))
    return file


def engines_of(args: argparse.Namespace, shape: str, form: str) -> Iterator[Engine]:
    """Yields the engines that have the model in a format."""
    file = file_of(args.directory, shape, form)
    options = json.dumps({"quantization": "int8"} if form == "int8" else {})
    places = {"{shape}": shape, "{format}": form, "{file}": str(file), "{options}": options}
    for text in args.engine:
        has_file = "{file}" in text
        for place, value in places.items():
            text = text.replace(place, value)
        engine = Engine.parse(text)
        if Path(engine.model).exists() and not (
            has_file and form == "int8" and "octavo" not in text
        ):
            yield engine


def label_of(engine: Engine, form: str) -> str:
    """Returns an engine's name in the results, with its second part unless that is the format."""
    return engine.name if engine.format == form else f"{engine.name}, {engine.format}"


def measure(args: argparse.Namespace) -> None:
    started = time.monotonic()
    done = {key_of(row) for row in read(args.results)}
    for turn in range(args.rounds):
        for shape in args.shapes:
            for form in args.formats:
                for case in args.cases:
                    for engine in engines_of(args, shape, form):
                        row: dict[str, object] = {"round": turn, "shape": shape, "format": form}
                        row |= {"case": case, "engine": label_of(engine, form)}
                        if key_of(row) in done:
                            continue
                        if time.monotonic() - started > 60 * args.minutes:
                            print("stopped: the same command goes on from here")
                            return
                        work = CASES[case]
                        (result,) = engine.run(
                            work.requests, work.prompt, work.output, (work.work,)
                        )
                        row["tokens_per_second"] = result["tokens_per_second"]
                        row |= {"at": time.strftime("%Y-%m-%d %H:%M:%S"), "machine": machine()}
                        with args.results.open("a") as file:
                            print(json.dumps(row), file=file)
                        print(json.dumps(row), flush=True)


def key_of(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row[name] for name in ("round", "shape", "format", "case", "engine"))


def read(results: Path) -> list[dict[str, object]]:
    return (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )


def print_table(results: Path, own_name: str) -> None:
    """Prints a row for each shape, format and case: the own median, each peer's, and the ratio."""
    rates: dict[tuple[object, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read(results):
        key = (row["shape"], row["format"], row["case"])
        rates[key][str(row["engine"])].append(float(str(row["tokens_per_second"])))
    peers = sorted({name for found in rates.values() for name in found} - {own_name})
    print(f"| shape | format | case | {own_name} |{''.join(f' {peer} |' for peer in peers)}")
    print(f"|---|---|---|---|{'---|' * len(peers)}")
    for key, found in rates.items():
        medians = {name: statistics.median(each) for name, each in found.items()}
        own = medians.get(own_name)
        cells = [f"{own:.3g}" if own else ""]
        for peer in peers:
            ratio = f" ({own / medians[peer]:.2f}x)" if own and peer in medians else ""
            cells.append(f"{medians[peer]:.3g}{ratio}" if peer in medians else "")
        print(f"| {' | '.join([*map(str, key), *cells])} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--engine", action="append", default=[])
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["1.7b", "4b", "8b"])
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--table", action="store_true", help="print FILE as a table")
    parser.add_argument("--own", default="octavo", help="the engine that is compared with others")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.table:
        print_table(args.results, args.own)
    else:
        measure(args)


if __name__ == "__main__":
    main()
