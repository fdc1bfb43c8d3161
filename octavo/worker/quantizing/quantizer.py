"""Quantizes a model layer by layer: each matrix is rounded when the calibration run reaches it, and
later ops use the rounded matrix.

Owns the order of the work: a matrix whose rows may still be divided by the factors of a later input
is written once these factors are known. Output formats are behind `Destination`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.ports import Checkpoint
from octavo.checkpoint.writing.destination import Destination, MatrixPlan
from octavo.executor.base import LoadWeight
from octavo.program.expert_ops import GroupedLinear
from octavo.program.ops import Linear
from octavo.program.program import Op, Program, Value, Weight
from octavo.quant.making.channels import awq_factors, smooth_factors
from octavo.quant.making.gptq import fitted, nearest
from octavo.quant.making.grid import Floats32, RoundedMatrix
from octavo.quant.making.recipe import Recipe
from octavo.utils.progress import Bar, Report
from octavo.worker.quantizing.calibration_run import CalibrationRun
from octavo.worker.quantizing.journal import Journal
from octavo.worker.quantizing.statistics import RowStatistics
from octavo.worker.quantizing.targets import (
    Fold,
    NormFold,
    RowsFold,
    added_values,
    chosen_ops,
    folds,
    get_matrices,
)

LARGEST = float(np.finfo(np.float16).max)
"""Largest value in a matrix for which every format has a scale."""
EXACT = "exact:"
"""Prefix of the exact run's Values in a journal."""


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """Matrices to quantize, by tensor name in order of use, and matrices that stay floats."""

    matrices: Mapping[str, MatrixPlan]
    left: tuple[str, ...]
    """Modules of linear ops that stay floats."""


def plan_matrices(
    program: Program,
    checkpoint: Checkpoint,
    destination: Destination,
    bits_of: Callable[[Weight], int],
) -> QuantizePlan:
    """Returns the plan; raises UnsupportedModel if there is nothing to quantize."""
    matrices: dict[str, MatrixPlan] = {}
    left: dict[str, None] = {}
    chosen = set(map(id, chosen_ops(program)))
    for op in program.ops:
        if not isinstance(op, Linear | GroupedLinear):
            continue
        for weight in get_matrices(op):
            for name in weight.tensor_names:
                stored = checkpoint.stored(name)
                shape, bits = stored.shape, bits_of(weight)
                output_major = checkpoint.output_major or stored.is_quantized
                is_turned = weight.transposed and not output_major
                # Experts in one tensor get the names of separate experts.
                written = name if stored.num_stacked else stored.name
                module = written.removesuffix(".weight")
                if id(op) in chosen and not is_turned and destination.supports(name, shape, bits):
                    plan = MatrixPlan(name, (shape[0], shape[1]), bits, module, stored.name)
                    matrices.setdefault(name, plan)
                else:
                    left[module] = None
    if not matrices:
        raise UnsupportedModel(
            f"{checkpoint.path}: none of the {len(left)} matrices can be stored in this format",
            hint="use another --group that divides the inputs; matrices stored as [in, out]"
            " (GPT-2) are not supported",
        )
    return QuantizePlan(matrices, tuple(left))


@dataclass(slots=True)
class Quantizer:
    """One quantization of a model."""

    program: Program
    checkpoint: Checkpoint
    load: LoadWeight
    recipe: Recipe
    destination: Destination
    plan: QuantizePlan
    journal: Journal
    _waiting: dict[str, RoundedMatrix] = field(default_factory=dict)
    """Matrices that are not written yet."""
    _values: dict[str, Floats32] = field(default_factory=dict)
    """Values of rounded matrices that a later op also uses."""
    _exact: CalibrationRun | None = None
    """Run of the unrounded model at the same op; None if its inputs are not needed."""
    _added: Mapping[str, Value] = field(default_factory=dict)
    """Value that is added to the outputs of a matrix, by the outputs' name; the outputs compensate
    for its errors.
    """
    _statistics: tuple[str, RowStatistics] | None = None
    """Name and statistics of the last Value that was read."""
    _factors: dict[str, Floats32] = field(default_factory=dict)
    """Factors of inputs, by Value name."""
    _folds: Mapping[str, Fold] = field(default_factory=dict)
    _vectors: dict[str, Floats32] = field(default_factory=dict)

    def run_plain(self, report: Report) -> None:
        """Rounds every matrix independently, without calibration."""
        written = set(self.journal.done)
        if written:
            report(_going_on(len(written), len(self.plan.matrices)))
        with Bar("matrices", len(self.plan.matrices)) as bar:
            for name, plan in self.plan.matrices.items():
                if name not in written:
                    self.destination.write_matrix(plan, self._nearest(plan))
                    self.journal.wrote([name])
                    self.journal.note()
                bar.advance()
                self.checkpoint.release()

    def run(self, token_ids: NDArray[np.int32], report: Report) -> None:
        """Rounds the matrices in order of use, over calibration texts `[texts, length]`."""
        run = CalibrationRun(self.program, self.load, token_ids)
        if self.recipe.gptaq:
            self._exact = CalibrationRun(self.program, self.load, token_ids)
            self._added = added_values(self.program)
        if self.recipe.method in ("awq", "smoothquant"):
            self._folds = folds(self.program, set(self.plan.matrices))
        last_uses, last_folds = self._last_uses(run.ops), self._last_folds(run.ops)
        end = max(last_uses.values()) + 1
        if self.journal.index:
            self._restore(run)
            report(_going_on(len(self.journal.done), len(self.plan.matrices)))
        with Bar("matrices", len(self.plan.matrices)) as bar:
            for _ in self.journal.done:
                bar.advance()
            while run.index < end:
                self._advance(run, bar)
                self._write_ready(run.index, last_folds)
                for name in [n for n in self._values if last_uses[n] < run.index]:
                    del self._values[name]
                self._save(run)
                self.checkpoint.release()
        assert not self._waiting, "every matrix is written behind the last op"

    def _advance(self, run: CalibrationRun, bar: Bar) -> None:
        """Rounds the matrices of the next op, and computes it."""
        op = run.op
        weights: dict[Weight, NDArray] = {}
        if isinstance(op, Linear):
            for weight in op.weights_:
                name = weight.tensor_names[0]
                if name in self.plan.matrices:
                    if name not in self._values:
                        self._round_linear(run, op, name)
                        bar.advance()
                    weights[weight] = _get_rows(self._values[name], weight)
        elif isinstance(op, GroupedLinear):
            for weight in op.matrices:
                if weight.tensor_names[0] in self.plan.matrices:
                    weights[weight] = self._round_experts(run, op, weight, bar)
        run.advance(weights)
        if self._exact is not None:
            self._exact.advance()

    # -- one matrix ----------------------------------------------------------------------------

    def _round_linear(self, run: CalibrationRun, op: Linear, name: str) -> None:
        statistics = self._get_statistics(run, op.x)
        plan = self.plan.matrices[name]
        factors = self._get_factors(run, op.x, statistics)
        weight = self._weight(plan)
        if self._exact is not None:
            weight = statistics.gptq.compensate(weight, self._missed(run, op, statistics))
        if factors is None:
            rounded = self._round(plan, weight, statistics)
            self._values[name] = rounded.values()
        else:
            importance = (statistics.importance / np.square(factors)).astype(np.float32)
            rounded = nearest(weight * factors, importance, self.destination.fit(plan))
            self._values[name] = rounded.values() / factors
        self._waiting[name] = rounded

    def _missed(
        self, run: CalibrationRun, op: Linear, statistics: RowStatistics
    ) -> NDArray[np.float64] | None:
        """Returns the correlation, `[out, in]`, of an op's inputs with the errors of the Value that
        is added to its outputs. Returns None if no Value is added.
        """
        added = self._added.get(op.outs[0].name)
        if added is None or self._exact is None or op.weights_[0].row_indices is not None:
            return None
        return statistics.missed(self._exact.rows(added), run.rows(added))

    def _round_experts(
        self, run: CalibrationRun, op: GroupedLinear, weight: Weight, bar: Bar
    ) -> NDArray:
        """Rounds the matrices of all experts, each with the rows routed to it."""
        rows, experts = run.rows(op.x), run.rows(op.ids).reshape(-1)
        made = []
        for expert, name in enumerate(weight.tensor_names):
            plan = self.plan.matrices[name]
            statistics = RowStatistics(rows[experts == expert], self.recipe.damp_percent)
            if statistics.is_empty:
                self.journal.listed.append(plan.module)
                rounded = self._nearest(plan)
            else:
                rounded = self._round(plan, self._weight(plan), statistics)
            made.append(rounded.values())
            self._waiting[name] = rounded
            bar.advance()
        return np.stack(made)

    def _round(
        self, plan: MatrixPlan, weight: Floats32, statistics: RowStatistics
    ) -> RoundedMatrix:
        if self.recipe.method == "gptq":
            if self.recipe.desc_act:
                return statistics.gptq.by_activity(weight, self.recipe.grid(plan.bits))
            return statistics.gptq.round_by_groups(weight, self.destination.fit(plan))
        return nearest(weight, statistics.importance, self.destination.fit(plan))

    def _nearest(self, plan: MatrixPlan) -> RoundedMatrix:
        return nearest(self._weight(plan), None, self.destination.fit(plan))

    def _weight(self, plan: MatrixPlan) -> Floats32:
        """Returns a matrix in fp32. Raises WeightMismatch if it contains NaN or a value without a
        scale in fp16.
        """
        weight: Floats32 = self.checkpoint.tensor(plan.name).dequantize()
        if not np.isfinite(weight).all():
            raise WeightMismatch(
                f"{self.checkpoint.path}: {plan.name} holds NaN or infinite numbers",
                hint="the file is damaged; download the model again",
            )
        largest = float(np.abs(weight).max(initial=0))
        if largest > LARGEST:
            raise WeightMismatch(
                f"{self.checkpoint.path}: {plan.name} has values up to {largest:.3g}, expected"
                f" at most {LARGEST:g} for fp16 scales",
                hint="the file is damaged; download the model again",
            )
        return weight

    def _get_statistics(self, run: CalibrationRun, x: Value) -> RowStatistics:
        if self._statistics is None or self._statistics[0] != x.name:
            exact = None if self._exact is None else self._exact.rows(x)
            statistics = RowStatistics(run.rows(x), self.recipe.damp_percent, exact)
            self._statistics = (x.name, statistics)
        return self._statistics[1]

    # -- factors -------------------------------------------------------------------------------

    def _get_factors(
        self, run: CalibrationRun, x: Value, statistics: RowStatistics
    ) -> Floats32 | None:
        """Returns the factors of a Value's columns. Returns None if they cannot be folded. The
        first call chooses them and divides the weights that produce the Value by them.
        """
        fold = self._folds.get(x.name)
        if fold is None or (self.recipe.method == "smoothquant" and isinstance(fold, RowsFold)):
            return None
        if x.name not in self._factors:
            factors = self._chosen_factors(run, x, fold, statistics)
            self._factors[x.name] = self._fold(fold, factors)
        return self._factors[x.name]

    def _chosen_factors(
        self, run: CalibrationRun, x: Value, fold: Fold, statistics: RowStatistics
    ) -> Floats32:
        names = {
            name: None
            for op in run.ops
            if isinstance(op, Linear) and op.x.name == x.name
            for weight in op.weights_
            for name in weight.tensor_names
        }
        weights = [self._weight(self.plan.matrices[name]) for name in names]
        if self.recipe.method == "smoothquant":
            return smooth_factors(weights, statistics.largest)
        strength = statistics.strength
        if isinstance(fold, RowsFold):
            counts = np.bincount(fold.rows)
            strength = (np.bincount(fold.rows, strength) / counts)[fold.rows].astype(np.float32)
        quick = fitted(self.recipe.grid(self.recipe.bits), searches=False)
        return awq_factors(weights, statistics.hessian, strength, quick)

    def _fold(self, fold: Fold, factors: Floats32) -> Floats32:
        """Divides the weights that produce an input by its factors; returns the factors as rounded
        in the precision of these weights.
        """
        if isinstance(fold, NormFold):
            whole = self._vector(fold.weight) + np.float32(fold.offset)
            stored = self._divide(fold.weight, factors, fold.offset)
            usable = (whole != 0) & (stored + np.float32(fold.offset) != 0)
            exact: Floats32 = np.divide(
                whole, stored + np.float32(fold.offset), out=factors.copy(), where=usable
            )
            if fold.bias is not None:
                self._divide(fold.bias, exact, 0.0)
            return exact
        first, each = np.unique(fold.rows, return_index=True)
        own = factors[each]
        name = fold.weight.tensor_names[0]
        rows = (
            first if fold.weight.row_indices is None else np.array(fold.weight.row_indices)[first]
        )
        self._waiting[name] = self._waiting[name].divided(rows, own)
        if fold.bias is not None:
            self._divide(fold.bias, own, 0.0)
        return factors

    def _vector(self, weight: Weight) -> Floats32:
        vector: Floats32 = self.load(weight).dequantize()
        return vector

    def _divide(self, weight: Weight, factors: Floats32, offset: float) -> Floats32:
        """Writes a vector divided by factors; returns it as it will be read back."""
        name = weight.tensor_names[0]
        whole: Floats32 = self._vectors.get(name, self.checkpoint.tensor(name).dequantize())
        indices = weight.row_indices
        own = slice(None) if indices is None else np.array(indices)
        changed = whole.copy()
        changed[own] = (whole[own] + np.float32(offset)) / factors - np.float32(offset)
        self._vectors[name] = self.destination.round_to_stored(name, changed)
        self.destination.write_vector(name, changed)
        stored: Floats32 = self._vectors[name][own]
        return stored

    # -- delayed writes ------------------------------------------------------------------------

    def _last_uses(self, ops: Sequence[Op]) -> dict[str, int]:
        """Returns the index of the last op that uses each matrix."""
        return {
            name: index
            for index, op in enumerate(ops)
            if isinstance(op, Linear | GroupedLinear)
            for weight in get_matrices(op)
            for name in weight.tensor_names
            if name in self.plan.matrices
        }

    def _last_folds(self, ops: Sequence[Op]) -> dict[str, int]:
        """Returns the index of the op after which each matrix's rows no longer change."""
        last_folds = {}
        for index, op in enumerate(ops):
            fold = self._folds.get(op.x.name) if isinstance(op, Linear) else None
            if isinstance(fold, RowsFold):
                last_folds[fold.weight.tensor_names[0]] = index
        return last_folds

    def _write_ready(self, index: int, last_folds: Mapping[str, int]) -> None:
        ready = [name for name in self._waiting if last_folds.get(name, -1) < index]
        for name in ready:
            self.destination.write_matrix(self.plan.matrices[name], self._waiting.pop(name))
        self.journal.wrote(ready)

    def _save(self, run: CalibrationRun) -> None:
        """Saves the state of the run at ops where it is small."""
        state = None if self._waiting or self._values else run.state()
        if state is not None and sum(array.dtype == np.float64 for array in state.values()) == 1:
            last = self.journal.index
            op = run.ops[run.index - 1]
            if isinstance(op, Linear | GroupedLinear) or run.index - last > 1:
                exact = (self._exact and self._exact.state()) or {}
                both = state | {EXACT + name: array for name, array in exact.items()}
                self.journal.save(run.index, both)

    def _restore(self, run: CalibrationRun) -> None:
        """Resumes the runs from the journal."""
        state = self.journal.state()
        own = {name: array for name, array in state.items() if not name.startswith(EXACT)}
        run.restore(self.journal.index, own)
        if self._exact is not None:
            exact = {name.removeprefix(EXACT): state[name] for name in state.keys() - own.keys()}
            self._exact.restore(self.journal.index, exact)


def _going_on(done: int, total: int) -> str:
    return f"resuming after {done} of {total} matrices"


def _get_rows(values: Floats32, weight: Weight) -> NDArray:
    """Returns the rows of a tensor's values that belong to a weight."""
    return values if weight.row_indices is None else values[np.array(weight.row_indices)]
