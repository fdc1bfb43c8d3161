"""One row through products whose inputs are mostly taken for zero, beside the same products whole.

    python benchmarks/sparse_columns.py --threads 2

A synthetic Program: products of 2,048 by 8,192 and back, each behind a norm, so that their inputs
are normal numbers, of which a threshold takes a known share for zero. Every variant is a Program of
its own, of more bytes than caches hold; they are timed in turns, and the medians of the seconds of
a step are printed as a JSON line for each format. It says what kernels gain, and nothing about a
model.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import cache

import numpy as np

from octavo.executor.base import BackendOptions
from octavo.executor.batch import StepBatch
from octavo.executor.native.backend import NativeBackend
from octavo.program.builder import Builder
from octavo.program.program import Program, Weight
from octavo.quant.online import pack_int4, pack_int8
from octavo.quant.packed import PackedWeight
from octavo.sparsity.passes.sparsify import Thresholds, sparsify

NARROW, WIDE, VOCAB = 2048, 8192, 64
THRESHOLDS = {50: 0.6745, 70: 1.0364, 90: 1.6449}
"""Magnitudes below which a share, in percent, of normal numbers is."""


def program(num_layers: int) -> Program:
    build = Builder("products", vocab_size=VOCAB)
    x = build.embedding(build.token_ids(), "table", VOCAB, NARROW)
    for layer in range(num_layers):
        x = build.linear(build.rms_norm(x, f"{layer}.a", 1e-5), f"{layer}.up", WIDE)
        x = build.linear(build.rms_norm(x, f"{layer}.b", 1e-5), f"{layer}.down", NARROW)
    return build.finish(logits=build.linear(build.gather_rows(x), "head", VOCAB))


def load_as(quantization: str) -> Callable[[Weight], PackedWeight]:
    """Returns what makes weights; those of a shape are the same in all layers."""
    pack = {"int8": pack_int8, "int4": pack_int4}[quantization]

    @cache
    def packed(shape: tuple[int, ...], *, is_product: bool) -> PackedWeight:
        if len(shape) == 1:
            return PackedWeight.plain(np.ones(shape, np.float32))
        values = np.random.default_rng(0).standard_normal(shape, np.float32)
        return pack(values) if is_product else PackedWeight.plain(values)

    return lambda weight: packed(weight.shape, is_product=weight.name[0].isdigit())


def one_row() -> StepBatch:
    zero = np.zeros(1, np.int32)
    return StepBatch(
        token_ids=zero + 5,
        key_indices=zero,
        positions=zero[None],
        query_starts=np.array([0, 1], np.int32),
        context_lens=np.zeros((0, 1), np.int32),
        slots=np.zeros((0, 1), np.int32),
        block_tables=np.zeros((0, 1, 1), np.int32),
        sample_rows=zero,
        sparse_from=zero,
    )


def measure(quantization: str, *, threads: int, layers: int, rounds: int) -> dict[str, object]:
    plain = program(layers)
    names = [w.name for w in plain.weights if len(w.shape) > 1 and w.name[0].isdigit()]
    variants = {"whole": plain} | {
        f"{share}%": sparsify(plain, Thresholds(dict.fromkeys(names, threshold)))
        for share, threshold in THRESHOLDS.items()
    }
    options = BackendOptions(max_tokens=8, num_threads=threads)
    runnables = {}
    for name, of in variants.items():
        backend = NativeBackend(options)
        runnable = backend.prepare_program(of, load_as(quantization))
        runnables[name] = runnable, backend.allocate(runnable.kv_layouts, [])
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, (runnable, kv) in runnables.items():
            began = time.perf_counter()
            runnable.run(one_row(), kv)
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "quantization": quantization,
        "threads": threads,
        "seconds": {name: round(each, 5) for name, each in medians.items()},
        "times whole": {name: round(medians["whole"] / each, 2) for name, each in medians.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quantization", nargs="*", default=["int8", "int4"])
    args = parser.parse_args()
    for quantization in args.quantization:
        print(
            json.dumps(
                measure(quantization, threads=args.threads, layers=args.layers, rounds=args.rounds)
            )
        )


if __name__ == "__main__":
    main()
