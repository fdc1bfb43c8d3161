"""Reads an adapter for one Program: finds the site of each module and slices its matrices to match
the Program's weights.

Returns the matrices; a backend's slots store them. Rejects an adapter that has no module of the
Program, or a module that the model does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import WeightMismatch, did_you_mean
from octavo.checkpoint.peft import ModuleUpdate, PeftAdapter, get_bare_name, read_peft
from octavo.program.low_rank import LowRank, Site, Updates
from octavo.program.ops import Linear
from octavo.program.passes.adapters import find_table_sites, iter_sites
from octavo.program.program import Program, Weight
from octavo.worker.lora.adapter_numbers import LoraDtype, LoraMatrices, get_stored_digest

HEADER_BYTES = 1 << 12
"""Upper bound on the bytes per module in a file header."""

SAME_MATRIX = 0.2
"""Maximum relative error between a packed matrix and its original."""

Dequantize = Callable[[Weight], NDArray[np.float32]]
"""Returns the values of a packed weight."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits its Program."""

    digest: bytes
    """Digest of its content combined with its stored precision."""
    updates: Updates

    @property
    def num_bytes(self) -> int:
        return sum(update.num_bytes for update in self.updates.values())


class AdapterReader:
    """Reads adapters for one Program, or for one rank's part of it."""

    def __init__(
        self,
        program: Program,
        dequantize: Dequantize,
        *,
        max_rank: int,
        dtype: LoraDtype = "auto",
        whole: Program | None = None,
    ) -> None:
        """`whole`: the complete Program with its sites if `program` is one rank's part of it."""
        everywhere = dict(iter_sites(whole or program))
        self._elsewhere = frozenset(map(get_bare_name, everywhere))
        """Names of all modules, including those of other ranks."""
        self._shapes = list(map(_whole_shape, everywhere.values()))
        self._dequantize = dequantize
        self._max_rank = max_rank
        self._dtype = dtype
        self._sites: dict[str, list[Site]] = {}
        for site in dict.fromkeys(iter_sites(program)):
            self._sites.setdefault(get_bare_name(site[0]), []).append(site)
        self._tables = find_table_sites(program)
        self._biases = _get_biases(program)

    def read(self, path: Path) -> Adapter:
        """Reads and checks an adapter; raises WeightMismatch or UnsupportedModel if it is
        invalid.
        """
        adapter = read_peft(path, max_rank=self._max_rank, max_bytes=self._max_bytes())
        updates: dict[Site, LowRank] = {}
        num_elsewhere = 0
        for update in adapter.updates.values():
            if update.module not in self._sites and update.module in self._elsewhere:
                num_elsewhere += 1
                continue
            for site in self._get_sites(update, adapter):
                if (low_rank := self._fit(update, site, adapter)) is not None:
                    updates[site] = low_rank
        if not (updates or num_elsewhere):
            raise WeightMismatch(
                f"{path}: the adapter has no tensors for modules of this model",
                hint="it was trained for another model, or its files are damaged",
            )
        return Adapter(get_stored_digest(adapter.digest, self._dtype), updates)

    def _max_bytes(self) -> int:
        """Returns the bytes of the largest possible adapter, including saved tables."""
        numbers = sum(
            self._max_rank * (rows + inputs) + 3 * rows + HEADER_BYTES
            for rows, inputs in self._shapes
        )
        tables = 2 * max((rows * inputs for rows, inputs in self._shapes), default=0)
        return 4 * (numbers + tables)

    def _get_sites(self, update: ModuleUpdate, adapter: PeftAdapter) -> list[Site]:
        """Returns the sites of a module: a table's single site, or its matmuls."""
        sites = [
            site
            for site in self._sites.get(update.module, ())
            if (site in self._tables) == (update.is_table or self._is_base_table(update, site))
        ]
        if not sites:
            raise WeightMismatch(
                f"{adapter.path}: this model has no {'embedding' if update.is_table else 'linear'}"
                f" layer {update.module} that supports adapters",
                hint=did_you_mean(update.module, self._sites),
            )
        return sites

    def _is_base_table(self, update: ModuleUpdate, site: Site) -> bool:
        """Whether the update changes none of the table's rows."""
        return update.a is None and update.base is not None and self.is_table(site)

    def is_table(self, site: Site) -> bool:
        return site in self._tables

    def _fit(self, update: ModuleUpdate, site: Site, adapter: PeftAdapter) -> LowRank | None:
        """Returns the part of a module's update for one site. Returns None if it changes
        nothing.
        """
        self._check_base(update, site[1], adapter)
        self._check_shapes(update, site, adapter)
        matrices = self._get_matrices(update, site, adapter)
        scales = update.scale * matrices.scales
        if self.is_table(site):
            return _table(matrices, scales, site[1]) if len(matrices.a) else None
        weight = site[1]
        gain = None if update.magnitude is None else self._gain(update, matrices, weight, adapter)
        bias = self._bias(update, weight, gain, adapter)
        if len(matrices.a) == 0 and bias is None:
            return None
        mine = np.ascontiguousarray(matrices.a[:, _own_inputs(weight)])
        return LowRank(mine, matrices.b[_own(weight)], scales, gain, bias)

    def _check_shapes(self, update: ModuleUpdate, site: Site, adapter: PeftAdapter) -> None:
        rows, inputs = self._shape(site)
        rank = 0 if update.a is None else len(update.a)
        for name, array, expected in (
            ("A", update.a, (rank, inputs)),
            ("B", update.b, (rows, rank)),
            ("its magnitude", update.magnitude, (rows,)),
            ("its bias", update.bias, (rows,)),
            ("the bias of B", update.added_bias, (rows,)),
        ):
            if array is not None and array.shape != expected:
                raise WeightMismatch(
                    f"{adapter.path}: {name} of {site[0]} has shape {array.shape}, expected"
                    f" {expected}",
                    hint="the adapter was trained for another model, or a file is damaged",
                )

    def _shape(self, site: Site) -> tuple[int, int]:
        """Returns the numbers of outputs and inputs of a module; the inputs of a table are its
        rows.
        """
        shape = _whole_shape(site[1])
        return shape[::-1] if self.is_table(site) else shape

    def _get_matrices(self, update: ModuleUpdate, site: Site, adapter: PeftAdapter) -> LoraMatrices:
        """Returns the matrices in their stored precision; empty matrices if the module has none."""
        rows, inputs = self._shape(site)
        a, b = update.a, update.b
        if a is None or b is None:
            a, b = np.zeros((0, inputs), np.float32), np.zeros((rows, 0), np.float32)
        matrices = LoraMatrices.convert(a, b, self._dtype)
        if not matrices.is_finite:
            raise WeightMismatch(
                f"{adapter.path}: {site[0]} has values too large for {self._dtype}",
                hint="set lora_dtype to float32",
            )
        return matrices

    def _gain(
        self, update: ModuleUpdate, matrices: LoraMatrices, weight: Weight, adapter: PeftAdapter
    ) -> NDArray[np.float32]:
        """Returns the gain of each output (DoRA): its magnitude divided by the norm of its row of W
        + scale * B A. All norms are computed on every rank, with the same rounding.
        """
        assert update.magnitude is not None
        whole = weight.whole
        norms = np.linalg.norm(
            self._dequantize(whole) + update.scale * matrices.product(_own(whole)), axis=1
        )
        if weight.cut is not None and weight.cut.rows is not None:
            norms = norms[slice(*weight.cut.rows)]
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            gain: NDArray[np.float32] = (update.magnitude[_own(weight)] / norms).astype(np.float32)
        if not np.isfinite(gain).all():
            raise WeightMismatch(
                f"{adapter.path}: {update.module} has a DoRA magnitude for a row of zeros"
            )
        return gain

    def _bias(
        self,
        update: ModuleUpdate,
        weight: Weight,
        gain: NDArray[np.float32] | None,
        adapter: PeftAdapter,
    ) -> NDArray[np.float32] | None:
        """Returns the bias to add to the base model's. Returns None without a bias, and on ranks
        that do not have the first part of the inputs.
        """
        if weight.cut is not None and weight.cut.inputs is not None and weight.cut.inputs[0] > 0:
            return None
        own = _own(weight)
        total: NDArray[np.float32] | None = None
        if update.added_bias is not None:
            total = np.float32(update.scale) * update.added_bias[own]
            total = total if gain is None else total * gain
        if update.bias is not None:
            base = self._biases.get(weight)
            if base is None:
                raise WeightMismatch(
                    f"{adapter.path}: the adapter has a bias for {update.module}, this model has"
                    " none"
                )
            change = update.bias[own] - self._dequantize(base)
            total = change if total is None else total + change
        return total

    def _check_base(self, update: ModuleUpdate, weight: Weight, adapter: PeftAdapter) -> None:
        """Checks that a base matrix saved with the adapter equals the model's."""
        if update.base is None:
            return
        own = _own(weight)
        shape = _whole_shape(weight)
        saved = update.base.astype(np.float32)
        saved = saved.T if weight.transposed and saved.shape == shape[::-1] != shape else saved
        if saved.shape == shape:
            mine = self._dequantize(weight)
            saved = saved[own][:, _own_inputs(weight)]
            if np.linalg.norm(saved - mine) <= SAME_MATRIX * np.linalg.norm(saved):
                return
        raise WeightMismatch(
            f"{adapter.path}: the adapter contains {update.module} (shape {update.base.shape}),"
            f" which differs from this model's (shape {shape})",
            hint="use an adapter of this model that does not train this module fully",
        )


def _own(weight: Weight) -> slice | list[int]:
    """Returns which rows of the module's matrix a weight contains."""
    return slice(None) if weight.row_indices is None else list(weight.row_indices)


def _own_inputs(weight: Weight) -> slice:
    """Returns which inputs of the module's matrix a weight contains; for a table, which columns."""
    span = None if weight.cut is None else weight.cut.inputs
    return slice(None) if span is None else slice(*span)


def _table(matrices: LoraMatrices, scales: NDArray[np.float64], table: Weight) -> LowRank:
    """Returns the update of a table, or of the rank's part of it."""
    a = np.ascontiguousarray(matrices.a.T[_own(table)])
    return LowRank(a, matrices.b[_own_inputs(table)], scales)


def _whole_shape(weight: Weight) -> tuple[int, int]:
    """Returns the numbers of outputs and inputs of the complete module of a matrix."""
    return weight.tensor_rows, weight.whole.shape[-1]


def _get_biases(program: Program) -> dict[Weight, Weight]:
    """Returns the bias of each matrix that has one."""
    biases: dict[Weight, Weight] = {}
    linears: Iterable[Linear] = (op for op in program.ops if isinstance(op, Linear))
    for op in linears:
        for weight, bias in zip(op.weights_, op.biases, strict=False):
            if bias is not None:
                biases[weight] = bias
    return biases
