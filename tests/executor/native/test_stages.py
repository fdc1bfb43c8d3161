"""The stages and ranges that lowering decides, and the executor's obedience to them."""

from itertools import pairwise

from octavo.checkpoint.open import open_checkpoint
from octavo.executor.native.stages import get_stages, sort_token_ops_first
from octavo.models.registry import build_programs
from octavo.program import expert_ops, ops
from octavo.program.passes.expert_gates import fold_expert_gates
from octavo.program.passes.optimize import optimize
from octavo.program.program import Value
from tests.support.native_harness import Case, normal, require_native
from tests.support.tiny_models import FAMILIES, tiny_model

NATIVE = [
    family
    for family in ("llama", "qwen3", "gemma3_text", "gpt2", "qwen2_moe")
    if family in FAMILIES
]


def stages_of_family(family):
    program = build_programs(open_checkpoint(tiny_model(family).path).config)["decoder"]
    program = sort_token_ops_first(fold_expert_gates(optimize(program)))
    return program, get_stages(program)


def test_stages_hold_every_op_once_in_order():
    for family in NATIVE:
        program, stages = stages_of_family(family)
        assert tuple(op for stage in stages for op in stage.ops) == program.ops


def test_only_row_local_ops_share_a_stage():
    for family in NATIVE:
        _, stages = stages_of_family(family)
        for stage in stages:
            assert stage.is_row_local or len(stage.ops) == 1


def test_attentions_and_experts_are_alone_in_their_ranges():
    """A block of rows never goes through an attention, which reads other rows' keys, or a product
    of experts, which takes each expert's rows together.
    """
    for family in NATIVE:
        _, stages = stages_of_family(family)
        ranges = [stage.range for stage in stages]
        assert ranges == sorted(ranges)
        for stage in stages:
            if isinstance(
                stage.ops[0], ops.Attention | expert_ops.Route | expert_ops.GroupedLinear
            ):
                assert ranges.count(stage.range) == 1
        assert any(ranges.count(number) > 1 for number in ranges)


def test_tokens_and_samples_share_no_range():
    for family in NATIVE:
        _, stages = stages_of_family(family)
        axes = {(stage.range, stage.axis) for stage in stages}
        assert len(axes) == len({number for number, _ in axes})


def counted_stages(make):
    """Returns how many stages one step of a Program's executor has."""
    require_native()
    case = Case({"x": normal(8, 16)}, make)
    runnable = case.native(None)
    case.run(runnable, 8)
    return runnable.progress


def test_the_executor_opens_the_stages_that_lowering_decides():
    """Three row-local ops run as one stage: the same number as for one."""

    def chain(num):
        names = [f"y{index}" for index in range(num)]

        def make(values):
            made = [values["x"], *(Value(name, "tokens", 16) for name in names)]
            return [ops.Scale(x, out, 1.5) for x, out in pairwise(made)]

        return make

    assert counted_stages(chain(1)) == counted_stages(chain(3))
