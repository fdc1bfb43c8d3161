"""Measures how the attention kernels are best cut into tiles on this machine's GPU, and writes the rows of the table.

    python benchmarks/tune_triton.py [--widths 64,128] [--groups 1,4,8] [--kv bfloat16,int8] [--contexts 512,4096] [--output FILE]

For each kernel, head width, number of query heads a KV head and type of cache: every candidate is run over the same random call, and the
one with the least summed time over the contexts becomes a row for this device. BLOCK_M of the kernels of one-row requests is given, not
searched: it says how many rows share a prefix, before the cache's type is known. With TRITON_INTERPRET=1 it runs on a CPU, to be tested.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import torch

from octavo.backends.base import BLOCK_SIZE, StepBatch
from octavo.backends.torch.attention import AttentionCall
from octavo.backends.torch.kv_cache import Stored
from octavo.backends.torch.rows import rows_of
from octavo.backends.torch.step import step_arrays
from octavo.backends.torch.triton import attention, tuning
from octavo.backends.torch.triton.attention import TritonAttention
from octavo.backends.torch.triton.device import device_name
from octavo.backends.torch.triton.tuning import Row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CANDIDATES: dict[str, dict[str, tuple[int, ...]]] = {
    "decode_attention": {"BLOCK_M": (16,), "BLOCK_N": (16, 32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3, 4)},
    "prefill_attention": {"BLOCK_M": (32, 64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3, 4)},
    "merge_attention": {"HEADS_A_TILE": (1, 2, 4), "num_warps": (1, 2, 4), "num_stages": (1, 2, 3)},
}
RUNS = 20


def call_of(kernel: str, width: int, group: int, kv: torch.dtype, context: int, requests: int) -> AttentionCall:
    """Requests of one row, or for prefill one prompt as long as its context; 8 KV heads."""
    rows = [context] if kernel == "prefill_attention" else [1] * requests
    blocks = -(-context // BLOCK_SIZE)
    tables = np.arange(len(rows) * blocks, dtype=np.int32).reshape(1, len(rows), blocks)
    positions = np.concatenate([np.arange(context - count, context) for count in rows]).astype(np.int32)
    batch = StepBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions[None],
        query_starts=np.cumsum([0, *rows]).astype(np.int32),
        context_lens=np.full((1, len(rows)), context, np.int32),
        slots=np.zeros((1, len(positions)), np.int32),
        block_tables=tables,
        sample_rows=np.zeros(0, np.int32),
    )
    inputs = {name: torch.from_numpy(array).to(DEVICE) for name, array in step_arrays(batch, [tables.size]).items()}
    dtype = kv if kv.is_floating_point else torch.bfloat16
    return AttentionCall(
        op=None,  # type: ignore[arg-type]  # kernels read the call
        q=torch.randn((len(positions), 8 * group, width), device=DEVICE).to(dtype),
        k=stored(tables.size, width, kv),
        v=stored(tables.size, width, kv),
        block_tables=inputs["block_tables"][0],
        context_lens=inputs["context_lens"][0],
        positions=inputs["positions"],
        inputs=inputs,
        rows=rows_of(batch, 0, full=False, window=None, device=DEVICE),
        batch=batch,
        group=0,
        once=lambda key, make: make(),
        scale=width**-0.5,
        v_width=width,
    )


def stored(num_blocks: int, width: int, kv: torch.dtype) -> Stored:
    shape = (num_blocks + 1, BLOCK_SIZE, 8)
    if kv.is_floating_point:
        return Stored(torch.randn((*shape, width), device=DEVICE).to(kv))
    codes = torch.randint(-127, 128, (*shape, width), dtype=torch.int8, device=DEVICE)
    return Stored(codes, torch.full(shape, 1 / 64, dtype=torch.bfloat16, device=DEVICE))


def launches(kernel: str) -> Iterator[dict[str, int]]:
    names = CANDIDATES[kernel]
    for values in product(*names.values()):
        yield dict(zip(names, values, strict=True))


def seconds(calls: Iterable[AttentionCall], kernel: str, launch: dict[str, int]) -> float:
    """Of one pass over the calls, the median; infinite where the device has not the memory for such tiles."""
    given = {kernel: launch}
    original = attention.tuned
    attention.tuned = lambda name, device, **shape: given.get(name) or original(name, device, **shape)
    kernels, found = TritonAttention(DEVICE), []
    try:
        for _ in range(RUNS + 1):
            synchronize()
            began = time.perf_counter()
            for call in calls:
                kernels.attend(call)
            synchronize()
            found.append(time.perf_counter() - began)
    except Exception as error:  # Triton's own, of several kinds and places from version to version
        if "resource" not in str(error).lower() and "shared memory" not in str(error).lower():
            raise
        return float("inf")
    finally:
        attention.tuned = original
    return float(np.median(found[1:]))


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def rows(args: argparse.Namespace) -> Iterator[Row]:
    for kernel, width, group, kv in product(args.kernels, args.widths, args.groups, args.kv):
        calls = [call_of(kernel, width, group, getattr(torch, kv), context, args.requests) for context in args.contexts]
        times = [(seconds(calls, kernel, launch), launch) for launch in launches(kernel)]
        best, launch = min(times, key=lambda entry: entry[0])
        print(json.dumps({"kernel": kernel, "width": width, "group": group, "kv": kv, "ms": round(1e3 * best, 3), **launch}), flush=True)
        yield Row(kernel, device_name(DEVICE), {"width": width, "group": group, "kv": kv}, launch)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=words, default=list(CANDIDATES))
    parser.add_argument("--widths", type=numbers, default=[64, 80, 96, 128, 256])
    parser.add_argument("--groups", type=numbers, default=[1, 4, 8])
    parser.add_argument("--kv", type=words, default=["bfloat16", "int8"], help="torch's names")
    parser.add_argument("--contexts", type=numbers, default=[512, 4096])
    parser.add_argument("--requests", type=int, default=16, help="of one row each")
    parser.add_argument("--output", type=Path, default=tuning.TABLE)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments)
    known = tuning.read(args.output) if args.output.exists() else ()
    tuning.write(args.output, [*known, *rows(args)])


if __name__ == "__main__":
    main()
