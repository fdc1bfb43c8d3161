"""Kernels by themselves, in the shapes of the model: attention of decode steps and of prompts,
products of few rows with packed weights, draws.

K and V lie in shuffled blocks. Runs that follow each other read more data than a cache holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.on_gpu.report import bound_of, timed
from benchmarks.on_gpu.settings import Emit, Settings, attempt
from benchmarks.on_gpu.shapes import Shape, attention_operations, shape_of
from benchmarks.on_gpu.timing import CACHE_BYTES, distinct, seconds, seconds_each
from benchmarks.tune_triton import call_of
from octavo.checkpoint.dummy import DummyWeights
from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.torch.attention.call import AttentionCall
from octavo.executor.torch.kernels import Kernels
from octavo.executor.torch.plain import PlainKernels
from octavo.executor.torch.sampling import GREEDY, sample
from octavo.executor.torch.triton.attention import TritonAttention
from octavo.executor.torch.triton.kernels import TritonKernels
from octavo.executor.torch.weights.device_weight import DeviceWeight
from octavo.executor.torch.weights.program_weights import Product
from octavo.program.program import Weight

KV_HEADS = 8
"""KV heads of the calls of `tune_triton.call_of`."""

DECODES = (
    (256, 1024, "bfloat16", 0),
    (256, 1024, "bfloat16", 448),
    (1, 32768, "bfloat16", 0),
    (256, 1024, "int8", 0),
)
"""Decode calls that are measured: requests, context, type of K and V, and blocks of a table beyond
the context, since captured steps have tables of full length."""

TINY_DECODES = ((3, 40, "bfloat16", 0), (2, 40, "int8", 3))


def section(settings: Settings, emit: Emit) -> None:
    alone = Alone(shape_of(tiny=settings.tiny), torch.device(settings.device), settings, emit)
    attempt(emit, "attention of prompts", alone.prefills)
    for case in TINY_DECODES if settings.tiny else DECODES:
        attempt(emit, f"attention of decode steps, {case}", partial(alone.decode, *case))
    attempt(emit, "packed products", alone.packed_products)
    attempt(emit, "draws", alone.draws)
    attempt(emit, "plain products", alone.plain_products)


@dataclass(frozen=True)
class Alone:
    shape: Shape
    device: torch.device
    settings: Settings
    emit: Emit

    @property
    def group(self) -> int:
        return max(1, self.shape.heads // KV_HEADS)

    @property
    def rounds(self) -> int:
        return 1 if self.settings.tiny else 10

    def bound_s(self, *, num_bytes: float = 0.0, operations: float = 0.0) -> float:
        return bound_of(self.settings.need_ceilings(), num_bytes=num_bytes, operations=operations)

    def decode(self, requests: int, context: int, kv: str, more: int) -> None:
        make = partial(
            call_of,
            "decode_attention",
            self.shape.head_width,
            self.group,
            getattr(torch, kv),
            context,
            requests,
        )
        calls = [_shuffled(make(), more)]
        num_bytes = _bytes_read(calls[0])
        calls += [
            _shuffled(make(), more)
            for _ in range(0 if self.settings.tiny else CACHE_BYTES // num_bytes)
        ]
        attend = TritonAttention(self.device).attend
        taken = seconds_each(
            [partial(attend, call) for call in calls], self.device, rounds=self.rounds
        )
        wide = f", tables of {context + more * BLOCK_SIZE:,}" if more else ""
        shape = f"{requests} x {context:,}, {kv}{wide}"
        self.emit(
            timed(
                "attention alone, decode", shape, taken, bound_s=self.bound_s(num_bytes=num_bytes)
            )
        )

    def prefills(self) -> None:
        """Measures prompts, and PyTorch's own attention over K and V that are not paged."""
        length, device = 33 if self.settings.tiny else 8192, self.device
        call = _shuffled(
            call_of(
                "prefill_attention", self.shape.head_width, self.group, torch.bfloat16, length, 1
            ),
            0,
        )
        shape, heads = f"1 x {length:,}, causal", call.q.shape[1]
        bound_s = self.bound_s(
            operations=attention_operations(length, heads, self.shape.head_width)
        )
        kernels = TritonAttention(device)
        taken = seconds(lambda: kernels.attend(call), device, rounds=self.rounds)
        self.emit(timed("attention alone, prefill", shape, taken, bound_s=bound_s))
        q = call.q.transpose(0, 1)[None]
        k, v = (
            torch.randn(1, KV_HEADS, length, self.shape.head_width, device=device).bfloat16()
            for _ in range(2)
        )
        run = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    taken = seconds(run, device, rounds=self.rounds)
            except RuntimeError:  # there is none here
                continue
            self.emit(
                timed(
                    f"PyTorch's attention, {name.split('_')[0].lower()}",
                    shape,
                    taken,
                    bound_s=bound_s,
                )
            )

    def packed_products(self) -> None:
        for stored in ("Q4_1", "I8"):
            for name, (outputs, inputs) in self.shape.matrices.items():
                weights = self._different(outputs, inputs, stored)
                for rows in (1, 16):
                    self._product(
                        f"product, {stored}, {name}", rows, weights, TritonKernels(self.device)
                    )

    def plain_products(self) -> None:
        """Measures PyTorch's products, which bf16 steps consist of."""
        for name, (outputs, inputs) in (
            self.shape.matrices | {"head": (self.shape.vocab, self.shape.hidden)}
        ).items():
            weights = self._different(outputs, inputs, "BF16")
            for rows in (
                (1, 3) if self.settings.tiny else (1, 256) if name == "head" else (1, 256, 8192)
            ):
                self._product(
                    f"product, bf16, {name}",
                    rows,
                    weights[:2] if rows > 256 else weights,
                    PlainKernels(),
                )

    def draws(self) -> None:
        rows = 3 if self.settings.tiny else 128
        logits = torch.randn(rows, self.shape.vocab, device=self.device).bfloat16()
        kernels = TritonKernels(self.device)
        taken = seconds(
            lambda: sample(logits, {}, GREEDY, kernels), self.device, rounds=self.rounds
        )
        self.emit(
            timed(
                "draw, greedy",
                f"{rows} rows of {self.shape.vocab:,}",
                taken,
                bound_s=self.bound_s(num_bytes=logits.nbytes),
            )
        )

    def _product(self, work: str, rows: int, weights: list[DeviceWeight], kernels: Kernels) -> None:
        outputs, inputs = weights[0].codes.shape[0], weights[0].width
        x = torch.randn(rows, inputs, device=self.device).bfloat16()
        runs: list[Callable[[], object]] = [
            partial(kernels.product, x, Product((weight,), None)) for weight in weights
        ]
        taken = seconds_each(runs, self.device, rounds=self.rounds)
        num_bytes = weights[0].num_bytes + x.nbytes + 2 * rows * outputs
        bound_s = self.bound_s(num_bytes=num_bytes, operations=2 * rows * outputs * inputs)
        self.emit(timed(work, f"{rows:,} rows", taken, bound_s=bound_s))

    def _different(self, outputs: int, inputs: int, stored: str) -> list[DeviceWeight]:
        """Returns as many weights as a cache does not hold."""
        load = DummyWeights(lambda weight: stored).load

        def weight(at: int) -> DeviceWeight:
            return DeviceWeight.of(
                load(Weight(f"{at}", (outputs, inputs))), self.device, torch.bfloat16
            )

        return distinct(weight, lambda one: one.num_bytes, most=16, tiny=self.settings.tiny)


def _shuffled(call: AttentionCall, more: int) -> AttentionCall:
    """Returns a call with blocks in random order, and `more` columns of the tables that no row
    reads.
    """
    tables = call.block_tables
    order = torch.randperm(tables.numel(), device=tables.device, dtype=torch.int32).view(
        tables.shape
    )
    return replace(call, block_tables=F.pad(order, (0, more)))


def _bytes_read(call: AttentionCall) -> int:
    """Returns the bytes that a call moves: keys and values of all contexts with their scales,
    queries and results.
    """
    tensors = [tensor for stored in (call.k, call.v) for tensor in stored.tensors]
    return (
        int(call.context_lens.sum()) * sum(tensor[0, 0].nbytes for tensor in tensors)
        + 2 * call.q.nbytes
    )
