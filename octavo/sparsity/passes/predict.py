"""Predict pass: predictor scores, computed from the attention's input, select the feed-forward
neurons of generated rows.

Adds two small matmuls before the attention and sets `ActMul.scores`. Runs first, on the complete
Program. Sources: DejaVu (Liu et al. 2023, arXiv 2310.17157); for the lookahead, ActiveFlow (Jia et
al. 2025, arXiv 2504.08378).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from octavo.api.errors import ConfigError
from octavo.program.ops import ActMul, Linear, PrefetchNeurons
from octavo.program.program import Op, Program, Value, Weight
from octavo.sparsity.neuron_predictors import PredictorNames
from octavo.sparsity.passes.sparsify import get_gate_name


@dataclass(frozen=True, slots=True)
class PredictorShape:
    """Location and rank of a predictor."""

    gate: str
    """First matrix that computes the gate."""
    input: str
    """First matrix that reads the predictor's input."""
    rank: int


def predict(
    program: Program, predictors: Sequence[PredictorShape], *, lookahead: int = 0
) -> Program:
    """Adds predictors to a Program.

    With `lookahead`, each layer's neurons are also predicted `lookahead` layers earlier, by the
    same predictor applied to the earlier layer's attention input. Raises ConfigError if a predictor
    does not fit the Program or a gate has none.
    """
    shapes = _by_gate(program, predictors)
    insertion_points = _find_insertion_points(program, shapes)
    before: dict[int, list[Op]] = {}
    scored: dict[ActMul, Value] = {}
    for index, (gate, shape) in enumerate(shapes.items()):
        added = _products(shape, _read_at(program, insertion_points[index]), gate.out)
        before.setdefault(insertion_points[index], []).extend(added)
        scored[gate] = added[-1].outs[0]
        if lookahead and index >= lookahead:
            insertion_point = insertion_points[index - lookahead]
            guess = _products(
                shape, _read_at(program, insertion_point), gate.out, suffix=".guessed"
            )
            hint = PrefetchNeurons(guess[-1].outs[0], shape.gate)
            before.setdefault(insertion_point, []).extend([*guess, hint])
    ops: list[Op] = []
    for insertion_point, op in enumerate(program.ops):
        ops += before.get(insertion_point, [])
        scores = scored.get(op) if isinstance(op, ActMul) else None
        ops.append(replace(op, scores=scores) if isinstance(op, ActMul) and scores else op)
    result = replace(program, ops=tuple(ops))
    result.check()
    return result


def _by_gate(
    program: Program, predictors: Sequence[PredictorShape]
) -> dict[ActMul, PredictorShape]:
    """Returns the predictor of each gate, in the Program's order."""
    makers = {value: op for op in program.ops for value in op.outputs}
    gates = {
        name: op
        for op in program.ops
        if isinstance(op, ActMul) and (name := get_gate_name(op, makers))
    }
    if not gates:
        raise ConfigError(
            f"sparsity_predictor: {program.name} has no gates to predict",
            hint="remove sparsity_predictor",
        )
    by_gate = {predictor.gate: predictor for predictor in predictors}
    if wrong := sorted(gates.keys() ^ by_gate.keys()):
        what = "has no predictor for" if wrong[0] in gates else "has a predictor for"
        raise ConfigError(
            f"sparsity_predictor: the file {what} {wrong[0]}, which does not match {program.name}",
            hint="calibrate this model: octavo calibrate MODEL --predictor-rank 64",
        )
    return {op: by_gate[name] for name, op in gates.items()}


def _find_insertion_points(program: Program, shapes: Mapping[ActMul, PredictorShape]) -> list[int]:
    """Returns the index of the matmul before which each predictor is inserted."""
    readers = {
        weight.name: index
        for index, op in enumerate(program.ops)
        if isinstance(op, Linear)
        for weight in op.weights_
    }
    points = [readers.get(shape.input, len(program.ops)) for shape in shapes.values()]
    for index, (gate, shape) in zip(points, shapes.items(), strict=True):
        if index >= program.ops.index(gate):
            raise ConfigError(
                f"sparsity_predictor: the predictor of {shape.gate} reads {shape.input}, which"
                f" {program.name} does not compute before it",
                hint="calibrate this model: octavo calibrate MODEL --predictor-rank 64",
            )
    return points


def _read_at(program: Program, index: int) -> Value:
    """Returns the input of the matmul at an index."""
    reader = program.ops[index]
    assert isinstance(reader, Linear), "it is one of them"
    return reader.x


def _products(
    shape: PredictorShape, x: Value, out: Value, *, suffix: str = ""
) -> tuple[Linear, Linear]:
    """Returns the two matmuls that compute scores.

    Lookahead predictors have separate weights with the same values, because a streamed weight may
    have only one reader.
    """
    names = PredictorNames(shape.gate)
    low = Value(f"{out.name}.predicted{suffix}", x.axis, shape.rank)
    scores = Value(f"{out.name}.scores{suffix}", out.axis, out.width)

    def weight(name: str, *shape: int) -> Weight:
        return Weight(f"{name}{suffix}", shape, sources=(name,) if suffix else ())

    return (
        Linear(x, (low,), (weight(names.down, shape.rank, x.width),)),
        Linear(
            low,
            (scores,),
            (weight(names.up, out.width, shape.rank),),
            (weight(names.bias, out.width),),
        ),
    )
