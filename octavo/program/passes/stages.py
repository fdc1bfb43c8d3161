"""Stages pass (pipeline parallelism): splits a Program at layers into consecutive parts, one per
process.

A stage reads the previous stage's hidden states and the step's token ids and positions; KV groups
follow their layers. Results do not change. Runs before shard and fuse. Source: Huang et al. 2019
(GPipe).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from octavo.api.errors import ConfigError
from octavo.program import ops
from octavo.program.program import CacheGroup, Op, Program, Value

HINT = "use fewer stages, or set pipeline_parallel_size to 1"


@dataclass(frozen=True, slots=True)
class StageCut:
    """A possible cut before the op with index `at`; only `value` is live there."""

    at: int
    value: Value


def stages(program: Program, num_stages: int) -> tuple[Program, ...]:
    """Returns the Program of each stage, in order.

    Raises ConfigError if there are fewer layers than stages or no possible cut.
    """
    if num_stages == 1:
        return (program,)
    _check_kind(program)
    cuts = _cuts(program)
    if len(cuts) + 1 < num_stages:
        raise ConfigError(
            f"pipeline_parallel_size: got {num_stages}, but {program.name} can be split at only"
            f" {len(cuts)} points",
            hint=HINT,
        )
    chosen = _get_balanced_cuts(program, cuts, num_stages)
    ends = [*(cut.at for cut in chosen), len(program.ops)]
    values = [None, *(cut.value for cut in chosen), None]
    programs = tuple(
        _part(program, (start, end), (values[index], values[index + 1]))
        for index, (start, end) in enumerate(pairwise([0, *ends]))
    )
    for index, part in enumerate(programs):
        _check_groups(program, part, (index, num_stages))
    return programs


def layer_inputs(program: Program) -> dict[int, Value]:
    """Returns the input rows of each layer but the first, by layer index, provided that no other
    Value is live there.
    """
    mixers = [index for index, op in enumerate(program.ops) if _is_layer(op)]
    cuts = iter(_cuts(program))
    inputs: dict[int, Value] = {}
    cut = next(cuts, None)
    for layer, (first, second) in enumerate(pairwise(mixers), 1):
        if cut is not None and first < cut.at <= second:
            inputs[layer] = cut.value
            cut = next(cuts, None)
    return inputs


def _check_kind(program: Program) -> None:
    if "logits" not in program.outputs:
        raise ConfigError(
            f"pipeline_parallel_size: {program.name} computes {', '.join(program.outputs)};"
            f" pipeline"
            f" stages require a generation model",
            hint="set pipeline_parallel_size to 1",
        )
    if any(group.kind == "cross" for group in program.groups):
        raise ConfigError(
            f"pipeline_parallel_size: {program.name} reads encoder outputs, which pipeline stages"
            f" do not forward",
            hint="set pipeline_parallel_size to 1",
        )
    others = sorted({*program.inputs} - {"token_ids"})
    if others:
        raise ConfigError(
            f"pipeline_parallel_size: {program.name} reads {others[0]} in addition to tokens,"
            f" which pipeline stages do not forward",
            hint="set pipeline_parallel_size to 1",
        )


def _cuts(program: Program) -> list[StageCut]:
    """Returns at most one cut between adjacent layers: the last position at which a single token
    Value is live and no later layer reads KV of an earlier one.
    """
    mixers = [index for index, op in enumerate(program.ops) if _is_layer(op)]
    last_reader = _last_readers(program)
    produced: set[Value] = set()
    live: list[set[Value]] = []
    for index, op in enumerate(program.ops):
        produced = {value for value in produced if last_reader[value] >= index}
        live.append(set(produced))
        produced.update(value for value in op.outputs if last_reader.get(value, -1) > index)
    cuts = []
    for first, second in pairwise(mixers):
        for index in range(second, first, -1):
            (value, *others) = live[index] or [None]
            if value is None or others or value.axis != "tokens" or value.dtype != "float":
                continue
            if _keeps_layers(program, index):
                cuts.append(StageCut(index, value))
                break
    return cuts


def _last_readers(program: Program) -> dict[Value, int]:
    last_readers = {value: index for index, op in enumerate(program.ops) for value in op.inputs}
    return last_readers | {value: len(program.ops) for value in program.outputs.values()}


def _keeps_layers(program: Program, index: int) -> bool:
    """Returns whether each layer's keys are read only on the side that writes them."""
    before, behind = _layers(program.ops[:index]), _layers(program.ops[index:])
    return before.isdisjoint(behind)


def _layers(some: Sequence[Op]) -> set[tuple[str, int]]:
    return {_get_layer(op) for op in some if _has_layer(op)}


def _get_layer(op: Any) -> tuple[str, int]:
    """Returns the cache group of an op's layer and the layer's index in it."""
    return op.group, op.layer


def _get_balanced_cuts(
    program: Program, cuts: Sequence[StageCut], num_stages: int
) -> list[StageCut]:
    """Returns the cuts that minimize the largest stage's weights; among equal choices, the first
    cuts.
    """
    before = [0, *accumulate(map(_num_weights, program.ops))]
    costs = [before[cut.at] for cut in cuts]
    best: dict[int, tuple[int, list[int]]] = {
        index: (costs[index], [index]) for index in range(len(cuts))
    }
    for _ in range(num_stages - 2):
        best = {
            index: min(
                (max(max_cost, costs[index] - costs[last]), [*chosen, index])
                for last, (max_cost, chosen) in best.items()
                if last < index
            )
            for index in range(len(cuts))
            if any(last < index for last in best)
        }
    _, chosen = min(
        (max(max_cost, before[-1] - costs[last]), chosen)
        for last, (max_cost, chosen) in best.items()
    )
    return [cuts[index] for index in chosen]


def _num_weights(op: Op) -> int:
    """Returns the weights that an op reads per row: its matrices, or one row of a table."""
    if isinstance(op, ops.Embedding):
        return op.out.width
    return sum(math.prod(weight.shape) for weight in op.weights)


def _part(
    program: Program, span: tuple[int, int], values: tuple[Value | None, Value | None]
) -> Program:
    """Returns a span of ops as a Program whose hidden input and output are `values`."""
    received, handed_on = values
    inputs = dict(program.inputs)
    if received is not None:
        inputs["hidden"] = received
    outputs = program.outputs if handed_on is None else {"hidden": handed_on}
    return extract_part(program, program.ops[slice(*span)], inputs, outputs)


def extract_part(
    program: Program,
    some: Sequence[Op],
    inputs: Mapping[str, Value],
    outputs: Mapping[str, Value],
) -> Program:
    """Returns the ops `some` as a separate Program, whose cache groups contain only their
    layers.
    """
    own = {
        group.name: sorted(layer for name, layer in _layers(some) if name == group.name)
        for group in program.groups
    }
    numbers = {
        (name, layer): index for name, layers in own.items() for index, layer in enumerate(layers)
    }
    part = replace(
        program,
        inputs=dict(inputs),
        outputs=dict(outputs),
        ops=tuple(_renumber(op, numbers) for op in some),
        groups=tuple(replace(group, num_layers=len(own[group.name])) for group in program.groups),
    )
    part.check()
    return part


def _has_layer(op: Op) -> bool:
    """Returns whether an op reads or writes KV blocks of a layer."""
    return hasattr(op, "group") and hasattr(op, "layer")


def _is_layer(op: Op) -> bool:
    """Returns whether an op reads other rows through KV blocks; each layer has exactly one
    such op.
    """
    return _has_layer(op) and not isinstance(op, ops.KvWrite)


def _renumber(op: Op, numbers: dict[tuple[str, int], int]) -> Op:
    if not _has_layer(op):
        return op
    changed: Any = op
    renumbered: Op = replace(changed, layer=numbers[_get_layer(op)])
    return renumbered


def _check_groups(program: Program, part: Program, place: tuple[int, int]) -> None:
    """Rejects a stage without a layer of some cache group, whose blocks would be empty."""
    empty: list[CacheGroup] = [group for group in part.groups if not group.num_layers]
    if empty:
        index, num_stages = place
        raise ConfigError(
            f"pipeline_parallel_size: got {num_stages}, but stage {index} of"
            f" {program.name} would have no layer of the cache group {empty[0].name}",
            hint=HINT,
        )
