"""Products with packed weights at 1 to 256 rows, beside other libraries' kernels over the same
shapes: PyTorch's `_weight_int4pack_mm`, humming-kernels, fp8, and experts beside `_grouped_mm`.

What is not installed, or refuses the device, is noted and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.on_gpu.report import bound_of, timed
from benchmarks.on_gpu.settings import Emit, Settings, attempt
from benchmarks.on_gpu.shapes import shape_of
from benchmarks.on_gpu.timing import Made, distinct, seconds, seconds_each
from octavo.checkpoint.dummy import DummyWeights
from octavo.executor.torch.kernels import Kernels, choose_kernels
from octavo.executor.torch.weights.device_weight import DeviceLevels, DeviceWeight
from octavo.executor.torch.weights.fp8 import as_e4m3, has_scaled_product
from octavo.executor.torch.weights.program_weights import Product
from octavo.program.program import Weight

MOST_COPIES = 8
ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
TINY_ROWS = (1, 9)
GROUP = 128
"""Inputs of a group in the peers' format."""
STORED = {"Q4_0": 32, "Q4_1": 0, "groups of 128": GROUP}
"""Formats of Octavo's products, and the inputs of a group; 0: as `DummyWeights` makes it."""


def section(settings: Settings, emit: Emit) -> None:
    shape = shape_of(tiny=settings.tiny)
    names = ("down",) if settings.tiny else ("q, k, v", "gate, up", "down")
    for name in names:
        case = Case(name, *shape.matrices[name], settings, emit)
        for what in (case.octavo, case.int4pack, case.humming, case.fp8):
            attempt(emit, f"{what.__name__}, {name}", what)
    attempt(emit, "experts", partial(experts, settings, emit))


@dataclass(frozen=True)
class Case:
    """One matrix of the model, `[outputs, inputs]`."""

    name: str
    outputs: int
    inputs: int
    settings: Settings
    emit: Emit

    @property
    def device(self) -> torch.device:
        return torch.device(self.settings.device)

    def octavo(self) -> None:
        kernels = choose_kernels("auto", self.device)
        for stored in STORED:
            weights = distinct(
                partial(self._weight, stored),
                lambda one: one.num_bytes,
                most=MOST_COPIES,
                tiny=self.settings.tiny,
            )
            for rows in self._rows():
                x = self._x(rows)
                runs = [partial(kernels.product, x, Product((weight,), None)) for weight in weights]
                self._timed(f"octavo, {stored}", rows, weights[0].num_bytes, runs)

    def int4pack(self) -> None:
        """Measures PyTorch's own product with 4-bit weights in groups of 128."""
        if self.device.type != "cuda":
            self.emit({"note": "_weight_int4pack_mm: not measured on a CPU"})
            return
        codes = torch.randint(0, 255, (self.outputs, self.inputs // 2), device=self.device)
        packed = torch._convert_weight_to_int4pack(codes.to(torch.uint8), 8)
        scales = torch.ones(self.inputs // GROUP, self.outputs, 2, device=self.device).bfloat16()
        num_bytes = packed.nbytes + scales.nbytes
        copies = self._different(lambda _: packed.clone(), num_bytes)
        for rows in self._rows():
            x = self._x(rows)
            runs = [partial(torch._weight_int4pack_mm, x, one, GROUP, scales) for one in copies]
            self._timed("_weight_int4pack_mm, groups of 128", rows, num_bytes, runs)

    def humming(self) -> None:
        """Measures humming-kernels' product with 4-bit weights in groups of 128."""
        try:
            from humming.layer import HummingLayer
        except ImportError as error:
            self.emit({"note": f"humming-kernels: {error}"})
            return

        def layer(_: int) -> Callable[[Tensor], Tensor]:
            made = HummingLayer(
                shape_n=self.outputs,
                shape_k=self.inputs,
                weight_config={"dtype": "uint4", "group_size": GROUP},
                torch_dtype=torch.bfloat16,
            ).to(self.device)
            made.load_from_unquantized(
                torch.randn(self.outputs, self.inputs, device=self.device).bfloat16()
            )
            made.transform()
            return made

        num_bytes = self.outputs * self.inputs // 2 + 2 * self.outputs * self.inputs // GROUP
        layers = self._different(layer, num_bytes)
        for rows in self._rows():
            runs = [partial(one, self._x(rows)) for one in layers]
            self._timed("humming, groups of 128", rows, num_bytes, runs)

    def fp8(self) -> None:
        """Measures the fp8 product as Octavo computes it, and a row-wise scaled one alone."""
        if not has_scaled_product(self.device):
            self.emit({"note": "fp8: not on this device"})
            return
        numbers = torch.randn(self.outputs, self.inputs, device=self.device)
        codes, scales = as_e4m3(numbers)
        weight = DeviceWeight(
            codes, self.inputs, 8, self.inputs, DeviceLevels(scales, None), is_scaled=True
        )
        weights = self._different(lambda _: replace(weight, codes=codes.clone()), weight.num_bytes)
        for rows in self._rows():
            x = self._x(rows)
            runs = [partial(one.product, x, None) for one in weights]
            self._timed("octavo, fp8", rows, weight.num_bytes, runs)
            if self.device.type != "cuda":
                continue
            row_codes, row_scales = as_e4m3(x.float())
            runs = [
                partial(
                    torch._scaled_mm,
                    row_codes,
                    one.codes.t(),
                    scale_a=row_scales,
                    scale_b=scales.t(),
                    out_dtype=torch.bfloat16,
                    use_fast_accum=True,
                )
                for one in weights
            ]
            self._timed("_scaled_mm alone, scales by row", rows, weight.num_bytes, runs)

    def _timed(self, work: str, rows: int, num_bytes: int, runs: list[Callable]) -> None:
        taken = seconds_each(runs, self.device, rounds=1 if self.settings.tiny else 10)
        moved = num_bytes + 2 * rows * (self.inputs + self.outputs)
        bound_s = bound_of(
            self.settings.need_ceilings(),
            num_bytes=moved,
            operations=2 * rows * self.outputs * self.inputs,
        )
        self.emit(timed(f"{work}, {self.name}", f"{rows} rows", taken, bound_s=bound_s))

    def _rows(self) -> tuple[int, ...]:
        return TINY_ROWS if self.settings.tiny else ROWS

    def _x(self, rows: int) -> Tensor:
        return torch.randn(rows, self.inputs, device=self.device).bfloat16()

    def _weight(self, stored: str, at: int) -> DeviceWeight:
        if not STORED[stored]:
            load = DummyWeights(lambda weight: stored).load
            packed = load(Weight(f"{at}", (self.outputs, self.inputs)))
            return DeviceWeight.of(packed, self.device, torch.bfloat16)
        group = min(STORED[stored], self.inputs)
        codes = torch.randint(0, 255, (self.outputs, self.inputs // 2), device=self.device)
        scales = torch.full((self.outputs, self.inputs // group), 0.01, device=self.device)
        levels = DeviceLevels(scales.half(), None)
        return DeviceWeight(
            codes.to(torch.uint8), self.inputs, 4, group, levels, zero_point=8, nibbles="halves"
        )

    def _different(self, make: Callable[[int], Made], num_bytes: int) -> list[Made]:
        """Returns as many weights of `num_bytes` as a cache does not hold."""
        return distinct(make, lambda _: num_bytes, most=MOST_COPIES, tiny=self.settings.tiny)


def experts(settings: Settings, emit: Emit) -> None:
    """Measures products of expert rows beside `torch._grouped_mm` over the same rows in bf16."""
    tiny, device = settings.tiny, torch.device(settings.device)
    num, outputs, inputs, chosen = (4, 48, 64, 2) if tiny else (64, 2816, 2048, 8)
    matrix = DeviceWeight(torch.randn(num, outputs, inputs, device=device).bfloat16(), inputs, 16)
    kernels = choose_kernels("auto", device)
    for tokens in (3,) if tiny else (1, 16, 64, 256, 4096):
        rows = tokens * chosen
        x = torch.randn(rows, inputs, device=device).bfloat16()
        ids = torch.randint(0, num, (rows,), device=device)
        used = int(ids.unique().numel())
        bound_s = bound_of(
            settings.need_ceilings(),
            num_bytes=2 * used * outputs * inputs,
            operations=2 * rows * outputs * inputs,
        )
        for name, run in _expert_runs(x, ids, matrix, kernels, device):
            taken = seconds(run, device, rounds=1 if tiny else 10)
            emit(timed(f"experts, {name}", f"{tokens} tokens x {chosen}", taken, bound_s=bound_s))


def _expert_runs(
    x: Tensor, ids: Tensor, matrix: DeviceWeight, kernels: Kernels, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    num = len(matrix.codes)
    rows = kernels.rows_of_experts(ids, num)
    yield "octavo", lambda: kernels.grouped(x, rows, matrix, None)
    if device.type == "cuda":
        order = ids.argsort(stable=True)
        ends = torch.bincount(ids, minlength=num).cumsum(0).int()
        weights = matrix.codes.transpose(1, 2)
        yield "_grouped_mm", lambda: torch._grouped_mm(x[order], weights, offs=ends)
