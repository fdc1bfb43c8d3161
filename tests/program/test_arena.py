"""The plan pass: on random Programs no memory has two owners at a time, and buffers are reused."""

from itertools import combinations

import torch
from hypothesis import given, settings

from octavo.checkpoint.open import open_checkpoint
from octavo.executor.native.stages import get_stages, plan_arena, sort_token_ops_first
from octavo.models.registry import build_programs
from octavo.program.ops import Linear
from octavo.program.passes.arena import IN_PLACE
from octavo.program.passes.fuse import fuse
from tests.support.random_programs import random_programs
from tests.support.tiers import examples
from tests.support.tiny_models import tiny_model

torch.set_num_threads(1)


def lifetimes(program, stages):
    """Returns for each Value with memory its op, and its first and last stage."""
    found = {}
    for at, op in enumerate(program.ops):
        for value in op.outputs:
            found[value] = (at, stages[at], stages[at])
    for at, op in enumerate(program.ops):
        crosses = any(out.axis != value.axis for value in op.inputs for out in op.outputs)
        for value in op.inputs:
            if value in found:
                maker, first, last = found[value]
                found[value] = (maker, first, max(last, stages[-1] if crosses else stages[at]))
    for value in program.outputs.values():
        found[value] = (*found[value][:2], stages[-1])
    return found


def share_memory(a, b):
    """Tells whether a row of one place has a float in common with the same row of the other."""
    return a.axis == b.axis and a.offset < b.offset + b.width and b.offset < a.offset + a.width


def takes_over(op, value, program):
    """Tells whether the op writes its out exactly where it reads `value`, element by element, and
    no later op reads that.
    """
    elementwise = (isinstance(op, IN_PLACE) and op.x == value) or (
        isinstance(op, Linear) and op.residual == value and op.x != value
    )
    later = program.ops[program.ops.index(op) + 1 :]
    outputs = program.outputs.values()
    return (
        elementwise and value not in outputs and not any(value in other.inputs for other in later)
    )


def check(program):
    program = sort_token_ops_first(program)
    stages = get_stages(program)
    locations = plan_arena(program, stages).locations
    lives = lifetimes(program, [index for index, stage in enumerate(stages) for _ in stage.ops])
    assert set(locations) == {value.name for value in lives}
    for a, b in combinations(sorted(lives, key=lambda value: lives[value][0]), 2):
        if not share_memory(locations[a.name], locations[b.name]) or lives[a][2] < lives[b][1]:
            continue
        assert locations[a.name] == locations[b.name], f"{a.name} and {b.name} overlap"
        owner = a
        while owner != b:  # each owner between them took the place over from the last one
            owner = next_owner(owner, program, locations)
            assert owner is not None, f"{b.name} overwrites {a.name}, which is still read"


def next_owner(owner, program, locations):
    outs = (out for op in program.ops for out in op.outputs if takes_over(op, owner, program))
    return next((out for out in outs if locations[out.name] == locations[owner.name]), None)


@settings(max_examples=examples(60), deadline=None)
@given(random_programs())
def test_no_two_live_values_share_memory(made):
    check(made.program)
    check(fuse(made.program))


def test_families():
    for family in ("llama", "gemma3_text", "gpt2", "qwen3"):
        check(fuse(build_programs(open_checkpoint(tiny_model(family).path).config)["decoder"]))


def test_memory_does_not_grow_with_layers():
    sizes = []
    for layers in (2, 9):
        path = tiny_model("llama", num_hidden_layers=layers).path
        program = fuse(build_programs(open_checkpoint(path).config)["decoder"])
        sizes.append(plan_arena(program, get_stages(program)).row_floats)
    assert sizes[0] == sizes[1]
