"""Measures how Triton's kernels are best cut into tiles on this machine's GPU, and writes the rows
of the table.

    python benchmarks/tune_triton.py [--kernels NAMES] [--widths 64,128] [--groups 1,4,8] [--kv
    bfloat16,int8] [--contexts 512,4096]
                                     [--matrices 4096x4096,14336x4096] [--bits 4,8] [--vocabularies
                                     128256] [--output FILE]

Attention: for each kernel, head width, number of query heads a KV head and type of cache, over the
contexts. Packed products: for each matrix (outputs x inputs) and number of bits, over 1, 4 and 16
rows. Draws: for each vocabulary, over 1 and 32 rows. Every candidate is run over the same random
calls, and the one with the least summed time becomes a row for this device. BLOCK_M of the kernels
of one-row requests is given, not searched: it says how many rows share a prefix, before the cache's
type is known. With TRITON_INTERPRET=1 it runs on a CPU, to be tested.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]

from benchmarks.on_gpu.timing import seconds_each  # noqa: E402
from octavo.executor.batch import StepBatch, sampling_records  # noqa: E402
from octavo.executor.kv import BLOCK_SIZE  # noqa: E402
from octavo.executor.torch.attention.call import AttentionCall  # noqa: E402
from octavo.executor.torch.attention.query_rows import make_query_rows  # noqa: E402
from octavo.executor.torch.kv_cache import KvTensor  # noqa: E402
from octavo.executor.torch.sampler_ops import record_words  # noqa: E402
from octavo.executor.torch.step import step_arrays  # noqa: E402
from octavo.executor.torch.triton import attention_tiles, packed_linear, pick, tuning  # noqa: E402
from octavo.executor.torch.triton.attention import TritonAttention  # noqa: E402
from octavo.executor.torch.triton.device import device_name  # noqa: E402
from octavo.executor.torch.triton.tuning import TunedLaunch  # noqa: E402
from octavo.executor.torch.weights.device_weight import DeviceLevels, DeviceWeight  # noqa: E402
from octavo.executor.torch.weights.program_weights import Product  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CANDIDATES: dict[str, dict[str, tuple[int, ...]]] = {
    "decode_attention": {
        "BLOCK_M": (16,),
        "BLOCK_N": (16, 32, 64, 128),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4),
    },
    "prefill_attention": {
        "BLOCK_M": (32, 64, 128),
        "BLOCK_N": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
    },
    "merge_attention": {
        "HEADS_A_TILE": (1, 2),
        "SPLITS": (1, 4, 16),
        "STAGES": (1, 2, 8),
        "num_warps": (1, 2, 4),
    },
    "packed_linear": {
        "BLOCK_N": (32, 64),
        "BLOCK_B": (64, 128, 256),
        "SPLITS": (1, 2, 4, 8),
        "num_warps": (1, 2),
        "num_stages": (2, 3, 4),
    },
    "pick": {"BLOCK": (1024, 2048, 4096), "PIVOTS": (2, 4, 8), "num_warps": (4, 8, 16)},
}
RUNS = 10
CACHE_BYTES = 128 << 20
"""Bytes of weights that no GPU's cache holds."""


def call_of(
    kernel: str, width: int, group: int, kv: torch.dtype, context: int, requests: int
) -> AttentionCall:
    """Returns a call of requests of one row each, or for prefill of one prompt as long as its
    context; 8 KV heads.
    """
    rows = [context] if kernel == "prefill_attention" else [1] * requests
    blocks = -(-context // BLOCK_SIZE)
    tables = np.arange(len(rows) * blocks, dtype=np.int32).reshape(1, len(rows), blocks)
    key_indices = np.concatenate([np.arange(context - count, context) for count in rows]).astype(
        np.int32
    )
    batch = StepBatch(
        token_ids=np.zeros(len(key_indices), np.int32),
        key_indices=key_indices,
        positions=key_indices[None],
        query_starts=np.cumsum([0, *rows]).astype(np.int32),
        context_lens=np.full((1, len(rows)), context, np.int32),
        slots=np.zeros((1, len(key_indices)), np.int32),
        block_tables=tables,
        sample_rows=np.zeros(0, np.int32),
    )
    inputs = {
        name: torch.from_numpy(array).to(DEVICE)
        for name, array in step_arrays(batch, [tables.size]).items()
    }
    dtype = kv if kv.is_floating_point else torch.bfloat16
    return AttentionCall(
        op=None,  # type: ignore[arg-type]  # kernels read the call
        q=torch.randn((len(key_indices), 8 * group, width), device=DEVICE).to(dtype),
        k=stored(tables.size, width, kv),
        v=stored(tables.size, width, kv),
        block_tables=inputs["block_tables"][0],
        context_lens=inputs["context_lens"][0],
        key_indices=inputs["key_indices"],
        inputs=inputs,
        rows=make_query_rows(batch, 0, full=False, window=None, device=DEVICE),
        batch=batch,
        group=0,
        once=lambda key, make: make(),
        scale=width**-0.5,
        v_width=width,
    )


def stored(num_blocks: int, width: int, kv: torch.dtype) -> KvTensor:
    shape = (num_blocks + 1, BLOCK_SIZE, 8)
    if kv.is_floating_point:
        return KvTensor(torch.randn((*shape, width), device=DEVICE).to(kv))
    codes = torch.randint(-127, 128, (*shape, width), dtype=torch.int8, device=DEVICE)
    return KvTensor(codes, torch.full(shape, 1 / 64, dtype=torch.bfloat16, device=DEVICE))


def launches(kernel: str) -> Iterator[dict[str, int]]:
    names = CANDIDATES[kernel]
    for values in product(*names.values()):
        yield dict(zip(names, values, strict=True))


def seconds(
    run: Callable[[], None], reads: ModuleType, kernel: str, launch: dict[str, int]
) -> float:
    """Returns the median time of one run in seconds, infinite where the device has too little
    memory for such tiles. `reads` is the module that asks the table.
    """
    original = reads.tuned
    reads.tuned = lambda name, device, **shape: (
        dict(launch) if name == kernel else original(name, device, **shape)
    )
    try:
        return seconds_each([run], DEVICE, rounds=RUNS)
    except Exception as error:  # Triton's own, of several kinds and places from version to version
        if "resource" not in str(error).lower() and "shared memory" not in str(error).lower():
            raise
        return float("inf")
    finally:
        reads.tuned = original


class Task(NamedTuple):
    """The calls that are run to find a kernel's tiles for a shape."""

    shape: dict[str, int | str]
    reads: ModuleType
    run: Callable[[], None]


def tasks(kernel: str, args: argparse.Namespace) -> Iterator[Task]:
    if kernel == "packed_linear":
        for (outputs, inputs), bits in product(args.matrices, args.bits):
            yield packed_task(outputs, inputs, bits)
    elif kernel == "pick":
        yield from map(pick_task, args.vocabularies)
    else:
        for width, group, kv in product(args.widths, args.groups, args.kv):
            calls = [
                call_of(kernel, width, group, getattr(torch, kv), context, args.requests)
                for context in args.contexts
            ]
            run = partial(attend_all, TritonAttention(DEVICE), calls)
            yield Task({"width": width, "group": group, "kv": kv}, attention_tiles, run)


def attend_all(kernels: TritonAttention, calls: Iterable[AttentionCall]) -> None:
    for call in calls:
        kernels.attend(call)


def packed_task(outputs: int, inputs: int, bits: int) -> Task:
    """Makes the task of packed products with more weights than a cache holds: rows in bf16, and
    with 4 bits an fp16 scale and min for every 32 inputs, with 8 an fp32 scale an output.
    """
    row_bytes = inputs * bits // 8
    count = max(1, min(16, CACHE_BYTES // (outputs * row_bytes))) if DEVICE.type == "cuda" else 1
    weights = [random_weight(outputs, inputs, bits) for _ in range(count)]
    batches = [torch.randn((rows, inputs), device=DEVICE).bfloat16() for rows in (1, 4, 16)]
    products = packed_linear.PackedProducts(DEVICE)

    def run() -> None:
        for x in batches:
            tile_rows = packed_linear.get_tile_rows(len(x))
            for weight in weights:
                products.product(x, Product((weight,), None), tile_rows)

    shape = {"outputs": outputs, "row_bytes": row_bytes, "bits": bits, "group": weights[0].group}
    return Task(shape, packed_linear, run)


def random_weight(outputs: int, inputs: int, bits: int) -> DeviceWeight:
    if bits == 4:
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
        numbers = torch.full((outputs, inputs // 32), 0.01, dtype=torch.float16, device=DEVICE)
        levels = DeviceLevels(numbers, None)
        return DeviceWeight(codes, inputs, bits, 32, levels, levels, nibbles="halves")
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=DEVICE)
    levels = DeviceLevels(torch.full((outputs, 1), 0.01, device=DEVICE), None)
    return DeviceWeight(codes, inputs, bits, inputs, levels)


def pick_task(vocab_size: int) -> Task:
    """Makes the task of draws whose rows have top_k and top_p."""
    batches = []
    for count in (1, 32):
        z = 3 * torch.randn((count, vocab_size), device=DEVICE)
        top = z.amax(dim=1).double()
        records = sampling_records(count, position=np.arange(count), top_k=50, top_p=0.9)
        words = torch.from_numpy(record_words(records)).to(DEVICE)
        batches.append((z, top, torch.ones_like(top), words))

    def run() -> None:
        for batch in batches:
            pick.pick(*batch, cuts=True, device=device_name(DEVICE))

    return Task({"vocab_size": vocab_size}, pick, run)


def rows(args: argparse.Namespace) -> Iterator[TunedLaunch]:
    for kernel in args.kernels:
        for task in tasks(kernel, args):
            times = [
                (seconds(task.run, task.reads, kernel, launch), launch)
                for launch in launches(kernel)
            ]
            best, launch = min(times, key=lambda entry: entry[0])
            print(
                json.dumps({"kernel": kernel, **task.shape, "ms": round(1e3 * best, 3), **launch}),
                flush=True,
            )
            yield TunedLaunch(kernel, device_name(DEVICE), task.shape, launch)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", type=words, default=list(CANDIDATES))
    parser.add_argument("--widths", type=numbers, default=[64, 80, 96, 128, 256])
    parser.add_argument("--groups", type=numbers, default=[1, 4, 8])
    parser.add_argument("--kv", type=words, default=["bfloat16", "int8"], help="torch's names")
    parser.add_argument("--contexts", type=numbers, default=[512, 4096])
    parser.add_argument("--requests", type=int, default=16, help="of one row each")
    matrices = lambda text: [tuple(map(int, part.split("x"))) for part in text.split(",")]  # noqa: E731
    parser.add_argument(
        "--matrices",
        type=matrices,
        default=[(4096, 4096), (14336, 4096), (4096, 14336)],
        help="outputs x inputs",
    )
    parser.add_argument("--bits", type=numbers, default=[4, 8])
    parser.add_argument("--vocabularies", type=numbers, default=[32000, 151936])
    parser.add_argument("--output", type=Path, default=tuning.TABLE)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments)
    known = tuning.read(args.output) if args.output.exists() else ()
    tuning.write(args.output, [*known, *rows(args)])


if __name__ == "__main__":
    main()
