"""The pass that folds the experts' gates: the same logits (reference, 1e-9), in fewer ops."""

import numpy as np
import pytest

from octavo.checkpoint.open import open_checkpoint
from octavo.executor.reference.backend import ReferenceBackend
from octavo.models.registry import build_programs
from octavo.program import expert_ops, ops
from octavo.program.passes.expert_gates import fold_expert_gates
from octavo.program.passes.fuse import fuse
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import tiny_model


class Folding(ReferenceBackend):
    """The reference backend over Programs with folded gates."""

    def prepare_program(self, program, load):
        return super().prepare_program(fold_expert_gates(fuse(program)), load)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_folded_is_unfolded(family):
    """The clamped gates with biases of gpt_oss among them."""
    path = tiny_model(family).path
    ids = np.arange(20)
    wanted = PagedRunner(path, ReferenceBackend()).logits(ids)
    found = PagedRunner(path, Folding()).logits(ids)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


def test_gate_and_up_are_one_op():
    """A layer of experts keeps two products, and no activation stands on its own."""
    config = open_checkpoint(tiny_model("mixtral").path).config
    program = fold_expert_gates(fuse(build_programs(config)["decoder"]))
    grouped = [op for op in program.ops if isinstance(op, expert_ops.GroupedLinear)]
    assert [op.gate is not None for op in grouped] == [True, False] * config["num_hidden_layers"]
    assert not any(isinstance(op, ops.ActMul) for op in program.ops)
