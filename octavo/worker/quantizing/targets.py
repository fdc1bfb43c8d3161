"""Selects the matrices of a Program to quantize, and where factors of their inputs can be folded:
into the norm, the gated matmul or the values that produce the input.

Depends only on the ops of a Program, so a new model family with the same order of ops needs no code
here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.program.expert_ops import GroupedLinear, Route
from octavo.program.ops import (
    ActMul,
    Add,
    Attention,
    KvWrite,
    LayerNorm,
    Linear,
    RmsNorm,
)
from octavo.program.program import Op, Program, Value, Weight


@dataclass(frozen=True, slots=True)
class NormFold:
    """The norm that produces an input. Factors are folded into its weight and bias."""

    weight: Weight
    bias: Weight | None
    offset: float


@dataclass(frozen=True, slots=True)
class RowsFold:
    """The matrix whose rows produce an input: row `rows[i]` produces input i."""

    weight: Weight
    bias: Weight | None
    rows: NDArray[np.intp]


Fold = NormFold | RowsFold


def chosen_ops(program: Program) -> list[Linear | GroupedLinear]:
    """Returns the linear ops to quantize: all except output layers and routers."""
    routed = {op.logits.name for op in program.ops if isinstance(op, Route)}
    return [
        op
        for op in program.ops
        if isinstance(op, GroupedLinear)
        or (
            isinstance(op, Linear)
            and not any(out.axis != "tokens" or out.name in routed for out in op.outs)
        )
    ]


def get_matrices(op: Linear | GroupedLinear) -> tuple[Weight, ...]:
    return op.weights_ if isinstance(op, Linear) else op.matrices


def added_values(program: Program) -> dict[str, Value]:
    """Returns the Value that is added to a matrix's outputs, by the outputs' name: the residual
    stream if it is computed before them.
    """
    makers = {value.name: index for index, op in enumerate(program.ops) for value in op.outputs}
    readers = Counter(value.name for op in program.ops for value in op.inputs)
    added = {}
    for op in program.ops:
        if not isinstance(op, Add):
            continue
        for own, other in ((op.a, op.b), (op.b, op.a)):
            index = makers.get(own.name, -1)
            maker = program.ops[index]
            if (
                isinstance(maker, Linear)
                and len(maker.outs) == len(maker.weights_) == 1
                and maker.activation is None
                and readers[own.name] == 1
                and makers.get(other.name, -1) < index
            ):
                added[own.name] = other
    return added


def folds(program: Program, quantized: set[str]) -> dict[str, Fold]:
    """Returns where the factors of a Value can be folded, by its name, for Values that only
    quantized matrices read. `quantized`: names of the tensors to quantize.
    """
    return _Folds(program, quantized).found()


class _Folds:
    """Producers and readers of a Program's Values."""

    def __init__(self, program: Program, quantized: set[str]) -> None:
        self._program = program
        self._quantized = quantized
        self._makers = {value.name: op for op in program.ops for value in op.outputs}
        self._readers: dict[str, list[Op]] = defaultdict(list)
        self._uses: dict[str, int] = defaultdict(int)
        for op in program.ops:
            for value in op.inputs:
                self._readers[value.name].append(op)
            for weight in op.weights:
                self._uses[weight.name] += 1

    def found(self) -> dict[str, Fold]:
        ends = {value.name for value in self._program.outputs.values()}
        folds: dict[str, Fold] = {}
        for name, reading in self._readers.items():
            maker = self._makers.get(name)
            if maker is None or name in ends or not all(map(self._is_quantized, reading)):
                continue
            fold = self._fold(maker)
            if fold is not None and self._uses[fold.weight.name] == 1:
                folds[name] = fold
        return folds

    def _is_quantized(self, op: Op) -> bool:
        return isinstance(op, Linear) and all(
            name in self._quantized for weight in op.weights_ for name in weight.tensor_names
        )

    def _fold(self, maker: Op) -> Fold | None:
        if isinstance(maker, RmsNorm | LayerNorm):
            if maker.weight.fill is not None or maker.weight.shape != (maker.out.width,):
                return None
            bias = maker.bias if isinstance(maker, LayerNorm) else None
            return NormFold(maker.weight, bias, maker.weight_offset)
        if isinstance(maker, ActMul) and maker.clamp is None and not maker.up_offset:
            return self._rows_fold(maker.up, np.arange(maker.out.width))
        if isinstance(maker, Attention):
            return self._values_fold(maker)
        return None

    def _values_fold(self, attention: Attention) -> RowsFold | None:
        """Returns the rows of V that produce each column of an attention's output. Returns None if
        factors cannot be folded there.
        """
        layer = (attention.group, attention.layer)
        at_layer = [
            op
            for op in self._program.ops
            if isinstance(op, KvWrite | Attention) and (op.group, op.layer) == layer
        ]
        writes = [op for op in at_layer if isinstance(op, KvWrite)]
        if len(at_layer) != 2 or len(writes) != 1 or attention.latent_width:
            return None
        if writes[0].v is None:
            return None
        group = self._program.group(attention.group)
        heads = np.arange(attention.num_heads) // (attention.num_heads // group.num_kv_heads)
        rows = (heads[:, None] * group.v_width + np.arange(group.v_width)).reshape(-1)
        return self._rows_fold(writes[0].v, rows)

    def _rows_fold(self, value: Value, rows: NDArray[np.intp]) -> RowsFold | None:
        maker = self._makers.get(value.name)
        if not isinstance(maker, Linear) or len(self._readers[value.name]) != 1:
            return None
        if len(maker.weights_) != 1 or len(maker.outs) != 1 or maker.activation or maker.residual:
            return None
        if not self._is_quantized(maker):
            return None
        return RowsFold(maker.weights_[0], maker.biases[0] if maker.biases else None, rows)
