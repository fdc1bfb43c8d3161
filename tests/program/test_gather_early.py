"""The gather pass: logits stay the same (reference backend, 1e-9), and behind the last attention
only sampled rows go through products.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

from octavo.checkpoint.open import open_checkpoint
from octavo.models.registry import build_programs
from octavo.program import expert_ops, ops
from octavo.program.passes.fuse import fuse
from octavo.program.passes.gather_early import find_gathered_ops, gather_early, gathered_before
from tests.program.test_fuse import FAMILIES, logits_of
from tests.support.random_programs import random_programs
from tests.support.tiers import examples
from tests.support.tiny_models import tiny_model

SAMPLED = (5, 5, 69, 0, 33)


def decoder_of(family):
    return build_programs(open_checkpoint(tiny_model(family).path).config)["decoder"]


@settings(max_examples=examples(12), deadline=None)
@given(random_programs())
def test_whatever_may_move_computes_the_same(made):
    program = fuse(made.program)
    gather = next(op for op in program.ops if isinstance(op, ops.GatherRows))
    early = gathered_before(program, gather, find_gathered_ops(gather, program))
    wanted = logits_of(made.program, made.weights, SAMPLED)
    np.testing.assert_allclose(
        logits_of(early, made.weights, SAMPLED), wanted, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("prepare", [lambda program: program, fuse], ids=["as written", "fused"])
def test_families(family, prepare):
    """No product behind the last attention takes all rows, but for a mixture's experts."""
    program = prepare(decoder_of(family))
    early = gather_early(program)
    assert Counter(op.kind for op in early.ops if op.kind != "GatherRows") == Counter(
        op.kind for op in program.ops if op.kind != "GatherRows"
    )
    last = max(at for at, op in enumerate(early.ops) if op.kind.endswith("Attention"))
    behind = {value.axis for op in early.ops[last + 1 :] for value in op.outputs}
    assert behind == {"samples"} or any(isinstance(op, expert_ops.Route) for op in early.ops[last:])
    assert gather_early(early).ops == early.ops


def test_a_llama_gathers_two_values():
    """A llama gathers two Values: the attention's result, and the rows that its projection is added
    to.
    """
    program = fuse(decoder_of("llama"))
    layers = tiny_model("llama").config["num_hidden_layers"]
    early = gather_early(program)
    gathers = [op for op in early.ops if isinstance(op, ops.GatherRows)]
    on_samples = [
        op for op in early.ops if isinstance(op, ops.Linear) and op.outs[0].axis == "samples"
    ]
    assert len(gathers) == 2 and len(on_samples) == 4
    assert sum(isinstance(op, ops.Linear) for op in early.ops) == 4 * layers + 1


@settings(max_examples=examples(10), deadline=None)
@given(random_programs())
def test_without_attention_nothing_moves(made):
    assert gather_early(made.program) is made.program
