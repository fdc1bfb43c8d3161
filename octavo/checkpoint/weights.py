"""Loads a Program's weights from a checkpoint: stacks, transposes, slices and converts tensors.

Depends only on the Checkpoint protocol, not on file formats or families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.fills import fill_weight
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.checkpoint.tensor_check import is_turned
from octavo.program.expert_ops import GroupedLinear, Route
from octavo.program.family_ops import Xielu
from octavo.program.ops import (
    Act,
    ActMul,
    Clip,
    Embedding,
    KvWrite,
    Linear,
)
from octavo.program.program import (
    TAPS,
    Program,
    Weight,
)
from octavo.quant.blocks import StoredWeight
from octavo.quant.fp8 import FP8
from octavo.quant.grouped import MIDDLE_OF_8
from octavo.quant.online import GROUP, check_int4, pack_fp8, pack_int4, pack_int8, pack_int8_groups
from octavo.quant.packed import Levels, PackedWeight

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "int4", "fp8"]
Packing = Literal["int8", "int8_groups", "int4", "fp8"]
"""Format in which a weight is packed."""

WIDE_TYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def packing_plan(program: Program, quantization: Quantization) -> dict[Weight, Packing]:
    """Returns the weights to pack at load and their formats: matrices of linears, experts and token
    embeddings.

    Raises UnsupportedModel if one cannot be packed. int4 keeps 8 bits for `sensitive_weights` and
    for embeddings (and tied output layers), which in 4 bits would by themselves raise SmolLM2's
    perplexity by 6%. fp8 leaves embeddings and output layers unpacked, as fp8 checkpoints do: in
    e4m3 they would add 3% to the perplexity increase of the other weights. int8 gives matrices of
    encoders a scale per group of 32 inputs and leaves their tables and value projections unpacked:
    MiniLM's embeddings then have a cosine similarity of 0.9997 to the originals, compared with
    0.9995 with packed value projections and 0.998 with one scale per output. Routers are never
    packed, since routing a token to a different expert is more than a rounding error. Norms, biases
    and position tables are not packed either.
    """
    routed = {op.logits.name for op in program.ops if isinstance(op, Route)}
    sensitive = sensitive_weights(program) if quantization == "int4" else set()
    plan: dict[Weight, Packing] = {}
    for op in program.ops:
        if isinstance(op, Linear) and not any(out.name in routed for out in op.outs):
            plan |= {
                weight.whole: "int8" if weight in sensitive else quantization
                for weight in op.weights_
                if weight.whole not in plan and not weight.stored_as
            }
        elif isinstance(op, GroupedLinear):
            plan[op.weight] = quantization
        elif isinstance(op, Embedding) and not op.by_position:
            plan[op.table] = "int8"
    for weight in _ends(program) if quantization == "fp8" else ():
        plan.pop(weight, None)
    tables = {op.table for op in program.ops if isinstance(op, Embedding)}
    if quantization == "int8" and program.groups and all(each.one_step for each in program.groups):
        plan = {
            weight: "int8_groups" if weight.shape[-1] % GROUP == 0 else "int8"
            for weight in plan
            if weight not in tables | value_weights(program)
        }
    for weight, bits in plan.items():
        if bits == "int4":
            check_int4(weight.shape[-1], weight.name)
    return plan


def _ends(program: Program) -> set[Weight]:
    """Returns the embeddings and output layers."""
    tables = {op.table for op in program.ops if isinstance(op, Embedding)}
    heads = (
        op
        for op in program.ops
        if isinstance(op, Linear) and any(out.axis == "samples" for out in op.outs)
    )
    return tables | {weight for op in heads for weight in op.weights_}


def sensitive_weights(program: Program) -> set[Weight]:
    """Returns the value projections, which are small with grouped heads, and half of the linears
    after a gate or activation (a block's `down`).

    That half is the first and last eighth of the blocks and every third between, as in llama.cpp's
    k-quants. SmolLM2's perplexity rises by 6.1% with none of them in 8 bits, by 4.3% with these,
    and by 3.8% with all of them (shuffled channels, full text of Opticks).
    """
    activated = {
        out.name for op in program.ops if isinstance(op, Act | ActMul | Xielu) for out in op.outputs
    }
    linears = [op for op in program.ops if isinstance(op, Linear)]
    downs = [op for op in linears if op.x.name in activated]
    eighth, inner = len(downs) // 8, range(len(downs) // 8, 7 * len(downs) // 8)
    selected = [
        op for index, op in enumerate(downs) if index not in inner or (index - eighth) % 3 == 2
    ]
    return {weight for op in selected for weight in op.weights_} | value_weights(program)


def value_weights(program: Program) -> set[Weight]:
    values = {op.v.name for op in program.ops if isinstance(op, KvWrite) and op.v is not None}
    values |= {op.x.name for op in program.ops if isinstance(op, Clip) and op.out.name in values}
    return {
        weight
        for op in program.ops
        if isinstance(op, Linear) and any(out.name in values for out in op.outs)
        for weight in op.weights_
    }


PACKED_FORMATS: dict[Packing, str] = {
    "int8": "I8",
    "int8_groups": "Q8_0",
    "int4": "Q4_1",
    "fp8": FP8,
}


def loaded_formats(
    header: ModelHeader, dtype: Dtype, quantization: Quantization | None, program: Program
) -> Callable[[Weight], str]:
    """Returns a function from a weight to its format after `WeightReader.load`, using only headers.

    Names are GGUF's, plus I8 and F8_E4M3 for one scale per output.
    """
    packed = {} if quantization is None else packing_plan(program, quantization)
    wide = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}.get(dtype)

    def format_of(weight: Weight) -> str:
        packing = packed.get(weight, packed.get(weight.whole))
        if packing is not None:
            return PACKED_FORMATS[packing]
        if weight.fill is not None:
            return "F32"
        return (
            header.get_format(weight.tensor_names[0])
            if wide is None or len(weight.shape) < 2
            else wide
        )

    return format_of


class WeightReader:
    """Loader of a Program's weights; `Backend.prepare_program` calls `load` for each.

    `dtype` "auto" keeps the file's precision; others convert every matrix (and dequantize), while
    vectors keep the file's precision. `quantization` packs the weights of `packing_plan(program)`
    and requires the Program. `importance` has a number per input of a matrix, by weight name, for
    packing to 4 bits. A rank's slice has the same bits as in the complete weight; for plain floats,
    only the slice is read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: Dtype = "auto",
        quantization: Quantization | None = None,
        program: Program | None = None,
        importance: Mapping[str, NDArray[np.float32]] | None = None,
    ) -> None:
        assert quantization is None or program is not None, (
            "quantization needs the Program, to know which weights are matrices"
        )
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._importance = importance or {}
        self._plan = (
            {} if quantization is None or program is None else packing_plan(program, quantization)
        )

    def load(self, weight: Weight) -> StoredWeight:
        """Returns the weight in its own shape; raises WeightMismatch if the checkpoint's shape
        differs.
        """
        if weight.fill is not None:
            return PackedWeight.plain(fill_weight(weight.shape, weight.fill))
        with np.errstate(
            invalid="ignore", over="ignore"
        ):  # NaN from a damaged file fails the requests that read it
            if weight.stored_as:
                return _repack([self._load(part) for part in weight.stored_parts], weight)
            return self._load(weight)

    def _load(self, weight: Weight) -> StoredWeight:
        parts = [self._part(name, weight) for name in weight.tensor_names]
        stacked = len(parts) > 1 or len(weight.shape) == len(parts[0].shape) + 1
        packed = self._stack(parts, weight) if stacked else parts[0]
        if packed.shape[:-1] != weight.shape[:-1] or packed.shape[-1] != self._num_read(weight):
            raise WeightMismatch(
                f"{self._checkpoint.path}: {weight.name} has shape {packed.shape}, expected"
                f" {weight.shape}",
                hint=(
                    "config.json and the weights belong to different models, or the file is damaged"
                ),
            )
        packed = self._in_precision(packed, weight)
        return packed if packed.shape == weight.shape else _inputs(packed, weight)

    def _stack(self, parts: Sequence[StoredWeight], weight: Weight) -> PackedWeight:
        """Stacks a weight's parts; parts of different formats are allowed if they are converted."""
        packed_parts = [part.packed() for part in parts]
        if len({_format(part) for part in packed_parts}) > 1:
            wide = WIDE_TYPES.get(self._dtype)
            if wide is not None or weight.whole in self._plan:
                packed_parts = [
                    PackedWeight.plain(part.dequantize().astype(wide or np.float32))
                    for part in packed_parts
                ]
            else:
                packed_parts = [_with_zeros(part) for part in packed_parts]
        return stack(packed_parts, weight.name)

    def _num_read(self, weight: Weight) -> int:
        """Returns the number of inputs to read: all for a weight packed here, because its scales
        depend on them.
        """
        return (
            weight.whole.shape[-1]
            if _cuts_inputs(weight) and weight.whole in self._plan
            else weight.shape[-1]
        )

    def _part(self, name: str, weight: Weight) -> StoredWeight:
        """Returns one source tensor, transposed and sliced to the weight's rows and columns."""
        packed: StoredWeight = self._checkpoint.tensor(name)
        if len(packed.shape) == len(weight.shape):
            packed = _own_experts(packed, weight)
        if weight.kernel:
            codes = packed.packed().codes
            is_vector = len(weight.shape) == 1
            packed = PackedWeight.plain(codes.reshape(-1 if is_vector else (len(codes), -1)))
        turned = len(packed.shape) > 1 and is_turned(
            self._checkpoint, self._checkpoint.stored(name), weight
        )
        if turned:
            packed = _transpose(packed, name)
        if weight.row_indices is not None:
            packed = _cut(packed, weight, weight.row_indices)
        if _cuts_inputs(weight) and weight.whole not in self._plan:
            packed = _inputs(packed, weight)
        return PackedWeight.plain(np.ascontiguousarray(packed.packed().codes)) if turned else packed

    def _in_precision(self, packed: StoredWeight, weight: Weight) -> StoredWeight:
        quantization = self._plan.get(weight, self._plan.get(weight.whole))
        if quantization == "int8":
            return pack_int8(packed.dequantize())
        if quantization == "int8_groups":
            return pack_int8_groups(packed.dequantize())
        if quantization == "fp8":
            return pack_fp8(packed.dequantize())
        if quantization == "int4":
            return pack_int4(packed.dequantize(), self._importance.get(weight.name))
        wide = WIDE_TYPES.get(self._dtype)
        if (
            wide is None
            or len(packed.shape) < 2
            or (packed.is_float and packed.packed().codes.dtype == wide)
        ):
            return packed
        return PackedWeight.plain(packed.dequantize().astype(wide, copy=False))


def stack(parts: list[PackedWeight], name: str) -> PackedWeight:
    """Stacks weights of one format and shape along a new first axis."""
    first = parts[0]
    if len({id(part.input_permutation) for part in parts}) > 1:
        raise UnsupportedModel(
            f"{name}: experts with permuted inputs (act-order) are not supported",
            hint="use --dtype bfloat16 to unpack the weights",
        )
    if any(_format(part) != _format(first) for part in parts):
        shapes = sorted({str(part.shape) for part in parts})
        raise WeightMismatch(
            f"{name}: its {len(parts)} tensors differ in shape or format: {', '.join(shapes)}"
        )
    return replace(
        first,
        shape=(len(parts), *first.shape),
        codes=np.stack([part.codes for part in parts]),
        scales=_stack_levels([part.scales for part in parts]),
        mins=_stack_levels([part.mins for part in parts]),
        zeros=None
        if first.zeros is None
        else np.stack([part.zeros for part in parts if part.zeros is not None]),
    )


def _with_zeros(part: PackedWeight) -> PackedWeight:
    """Returns integer codes with explicit zeros per group."""
    if part.code != "uint" or part.zeros is not None or part.scales is None:
        return part
    base = 0 if part.bits == 4 else MIDDLE_OF_8
    zero = part.zero_point - base
    if zero not in range(-MIDDLE_OF_8, MIDDLE_OF_8):
        return part
    zeros = np.full(part.scales.values.shape, zero, np.int8)
    return replace(part, zeros=zeros, zero_point=base)


def _format(part: PackedWeight) -> tuple[object, ...]:
    """Returns the properties that weights must share to be stacked."""
    return (
        part.shape,
        part.bits,
        part.code,
        part.group,
        part.zero_point,
        part.nibbles,
        part.activation,
        part.scales is None,
        part.mins is None,
        part.zeros is None,
        None if part.lookup is None else part.lookup.tobytes(),
        id(part.input_permutation),
    )


def _stack_levels(levels: list[Levels | None]) -> Levels | None:
    present = [level for level in levels if level is not None]
    if not present:
        return None
    supers = [level.super_scale for level in present if level.super_scale is not None]
    return Levels(
        np.stack([level.values for level in present]), np.stack(supers) if supers else None
    )


def _transpose(packed: StoredWeight, name: str) -> PackedWeight:
    """Returns `[..., in, out]` floats as `[..., out, in]`, a view."""
    if not packed.is_float:
        raise UnsupportedModel(f"{name}: a quantized matrix stored as [in, out] is not supported")
    return PackedWeight.plain(packed.packed().codes.swapaxes(-1, -2))


def _cut(packed: StoredWeight, weight: Weight, rows: tuple[int, ...]) -> StoredWeight:
    """Returns the weight's own rows of the output axis, a view if they are contiguous."""
    axis = weight.row_axis if len(packed.shape) > 1 else -1
    num_stacked = len(weight.shape) - len(packed.shape)
    if (
        num_stacked not in (0, 1 if weight.sources else 0)
        or packed.shape[axis] != weight.tensor_rows
    ):
        raise WeightMismatch(
            f"{weight.name} has shape {packed.shape}, expected {weight.tensor_rows} rows of"
            f" {weight.shape}"
        )
    neighbours = rows[-1] - rows[0] == len(rows) - 1 and weight.row_run == weight.row_step
    index = slice(rows[0], rows[-1] + 1) if neighbours else np.array(rows)
    if axis == -2:
        return packed.rows(index)
    if not packed.is_float:
        raise UnsupportedModel(f"{weight.name}: cannot slice rows of a quantized vector")
    picked: NDArray = packed.packed().codes[..., index]
    return PackedWeight.plain(picked)


def _own_experts(packed: StoredWeight, weight: Weight) -> StoredWeight:
    """Returns a rank's experts; the tensor itself if it has all of them."""
    if weight.cut is None or weight.cut.experts is None:
        return packed
    if packed.shape[0] != weight.cut.shape[0]:
        raise WeightMismatch(
            f"{weight.name} has shape {packed.shape}, expected {weight.cut.shape[0]} experts"
        )
    return packed.matrices(*weight.cut.experts)


def _cuts_inputs(weight: Weight) -> bool:
    return weight.cut is not None and weight.cut.inputs is not None


def _inputs(packed: StoredWeight, weight: Weight) -> StoredWeight:
    """Returns a weight's slice of the last axis."""
    assert weight.cut is not None and weight.cut.inputs is not None
    width = weight.cut.shape[-1]
    if packed.shape[-1] != width:
        raise WeightMismatch(f"{weight.name} has shape {packed.shape}, expected {width} inputs")
    try:
        return packed.inputs(*weight.cut.inputs)
    except ValueError as error:
        raise UnsupportedModel(
            f"{weight.name}: {error}",
            hint="use --dtype bfloat16, which unpacks the weights",
        ) from None


def _repack(parts: Sequence[StoredWeight], weight: Weight) -> StoredWeight:
    """Returns a weight in its own shape, built from the checkpoint's tensors."""
    first, *others = (part.packed().codes if part.is_float else part.dequantize() for part in parts)
    if weight.stored_as in ("row", "planes"):
        reshaped = first.reshape(weight.shape)
    elif weight.stored_as == "heads":
        reshaped = np.concatenate([first.reshape(-1), *others]).reshape(weight.shape)
    elif weight.stored_as == "strided":
        reshaped = _unfold(first, weight.kernel[0]).reshape(weight.shape)
    elif weight.stored_as == "tap":
        reshaped = first[:, :, weight.tap]
    else:
        outputs, width = weight.shape[0], weight.shape[1] // TAPS
        reshaped = np.zeros(weight.shape, first.dtype)
        run = reshaped[:, weight.tap * width :][:, :width]
        run[:, :-1] = first.transpose(0, 2, 1).reshape(outputs, -1)
        run[:, -1] = others[0]
    return PackedWeight.plain(np.ascontiguousarray(reshaped))


def _unfold(kernel: NDArray[Any], num_bands: int) -> NDArray[Any]:
    """Returns a strided convolution `[out, in, TAPS, TAPS]`, padded by one band, as a matrix
    `[(num_bands + 1) // 2, out, TAPS, num_bands, in]`.
    """
    outputs, inputs, _, _ = kernel.shape
    num_kept = -(-num_bands // 2)
    made = np.zeros((num_kept, outputs, TAPS, num_bands, inputs), kernel.dtype)
    for kept in range(num_kept):
        for tap in range(TAPS):
            band = 2 * kept - 1 + tap
            if 0 <= band < num_bands:
                made[kept, :, :, band] = kernel[:, :, :, tap].transpose(0, 2, 1)
    return made
