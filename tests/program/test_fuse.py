"""The fuse pass: a fused Program computes what the Program computes (reference backend, 1e-9), and
folds what it is there to fold.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.batch import StepBatch
from octavo.executor.reference.backend import ReferenceBackend
from octavo.models.registry import build_programs
from octavo.program import ops
from octavo.program.passes.fuse import fuse
from octavo.program.program import Program, Value, Weight
from octavo.quant.packed import PackedWeight
from tests.support.paged_runner import PagedRunner
from tests.support.random_programs import NUM_ROWS, random_programs
from tests.support.tiers import examples
from tests.support.tiny_models import tiny_model

torch.set_num_threads(1)

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3_text", "gpt2", "gpt_oss"]


def batch_of(rows, sampled=None):
    """Makes one request's first step, with the rows `sampled`, all where None."""
    return StepBatch(
        token_ids=np.arange(rows, dtype=np.int32),
        key_indices=np.arange(rows, dtype=np.int32),
        positions=np.arange(rows, dtype=np.int32)[None],
        query_starts=np.array([0, rows], np.int32),
        context_lens=np.array([[rows]], np.int32),
        slots=np.arange(rows, dtype=np.int32)[None],
        block_tables=np.arange(8, dtype=np.int32)[None, None],
        sample_rows=np.arange(rows, dtype=np.int32)
        if sampled is None
        else np.array(sampled, np.int32),
    )


def logits_of(program, weights, sampled=None):
    backend = ReferenceBackend()
    runnable = backend.prepare_program(
        program, lambda weight: PackedWeight.plain(weights[weight.name])
    )
    return runnable.run(
        batch_of(NUM_ROWS, sampled),
        backend.allocate(runnable.kv_layouts, [8] * len(program.groups)),
    ).arrays["logits"]


@settings(max_examples=examples(12), deadline=None)
@given(random_programs())
def test_fused_is_unfused(made):
    wanted = logits_of(made.program, made.weights)
    np.testing.assert_allclose(
        logits_of(fuse(made.program), made.weights), wanted, rtol=1e-9, atol=1e-9
    )


@settings(max_examples=examples(12), deadline=None)
@given(random_programs())
def test_fusing_twice_is_fusing_once(made):
    once = fuse(made.program)
    assert len(fuse(once).ops) == len(once.ops)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """Every family's logits are the same from the fused Program (reference backend, 1e-9)."""
    path, ids = tiny_model(family).path, np.random.default_rng(3).integers(0, 250, 40)
    runner = PagedRunner(path)
    wanted = runner.logits(ids)
    program = fuse(runner.programs["decoder"])
    assert len(program.ops) < len(runner.programs["decoder"].ops)
    runner.runnables["decoder"] = runner.backend.prepare_program(
        program, WeightReader(open_checkpoint(path)).load
    )
    np.testing.assert_allclose(runner.logits(ids), wanted, rtol=1e-9, atol=1e-9)


def test_what_a_llama_layer_becomes():
    """A fused llama layer is four products (q+k+v, o, gate+up, down): no norms, gates or sums."""
    config = open_checkpoint(tiny_model("llama").path).config
    program = fuse(build_programs(config)["decoder"])
    kinds = Counter(op.kind for op in program.ops)
    layers = tiny_model("llama").config["num_hidden_layers"]
    assert kinds == Counter(
        {
            "Embedding": 1,
            "Linear": 4 * layers + 1,
            "Rope": 2 * layers,
            "KvWrite": layers,
            "Attention": layers,
            "GatherRows": 1,
        }
    )
    linears = [op for op in program.ops if isinstance(op, ops.Linear)]
    assert [len(op.weights_) for op in linears] == [3, 1, 2, 1] * layers + [1]
    assert [op.norm is not None for op in linears] == [True, False, True, False] * layers + [True]
    assert [op.residual is not None for op in linears] == [False, True] * 2 * layers + [False]
    assert [op.gate is not None for op in linears] == [False, False, True, False] * layers + [False]


def test_what_an_encoders_layer_becomes():
    """No activation and no sum of a fused bert layer is an op by itself."""
    config = open_checkpoint(tiny_model("bert").path).config | {"pooling": {"mode": "mean"}}
    program = fuse(build_programs(config)["encoder"])
    kinds = Counter(op.kind for op in program.ops)
    layers = tiny_model("bert").config["num_hidden_layers"]
    assert (kinds["Act"], kinds["Linear"], kinds["LayerNorm"]) == (0, 4 * layers, 1 + 2 * layers)
    activations = [op.activation for op in program.ops if isinstance(op, ops.Linear)]
    assert activations == [None, None, "gelu", None] * layers


# -- what must stay as it is -----------------------------------------------------------------------

X, NORMED, Y, Z, OUT = (Value(name, "tokens", 8) for name in ("x", "normed", "y", "z", "out"))
W1, W2 = Weight("w1", (8, 8)), Weight("w2", (8, 8))


def fused(*body, outputs=(OUT,)):
    return fuse(
        Program("test", {"hidden": X}, {f"out{i}": value for i, value in enumerate(outputs)}, body)
    ).ops


def test_a_norm_that_others_read_stays():
    norm = ops.RmsNorm(X, NORMED, Weight("n", (8,)), 1e-5)
    body = (norm, ops.Linear(NORMED, (Y,), (W1,)), ops.Add(Y, NORMED, OUT))
    assert norm in fused(*body)
    assert norm in fused(*body[:2], outputs=(Y, NORMED))


def test_a_head_norm_stays():
    norm = ops.RmsNorm(X, NORMED, Weight("n", (4,)), 1e-5, 0.0, 4)
    assert fused(norm, ops.Linear(NORMED, (OUT,), (W1,)))[0] == norm


def test_halves_of_a_gate_that_others_read_stay():
    body = (ops.Linear(X, (Y,), (W1,)), ops.Linear(X, (Z,), (W2,)), ops.ActMul(Y, Z, OUT, "silu"))
    assert [op.kind for op in fused(*body)] == ["Linear"]
    assert [op.kind for op in fused(*body, outputs=(OUT, Z))] == ["Linear", "ActMul"]


def test_an_activation_of_rows_that_others_read_stays():
    body = (ops.Linear(X, (Y,), (W1,)), ops.Act(Y, OUT, "gelu"))
    assert [op.kind for op in fused(*body)] == ["Linear"]
    assert [op.kind for op in fused(*body, outputs=(OUT, Y))] == ["Linear", "Act"]
    two = (ops.Linear(X, (Y, Z), (W1, W2)), ops.Act(Y, OUT, "gelu"))
    assert [op.kind for op in fused(*two, outputs=(OUT, Z))] == ["Linear", "Act"]


def test_a_gate_the_other_way_round_stays():
    body = (ops.Linear(X, (Y,), (W1,)), ops.Linear(X, (Z,), (W2,)), ops.ActMul(Z, Y, OUT, "silu"))
    assert [op.kind for op in fused(*body)] == ["Linear", "ActMul"]


def test_a_sum_with_what_is_made_later_stays():
    late = ops.Scale(Y, Z, 2.0)
    assert [op.kind for op in fused(ops.Linear(X, (Y,), (W1,)), late, ops.Add(Y, Z, OUT))] == [
        "Linear",
        "Scale",
        "Add",
    ]


def test_a_sum_of_a_value_with_itself_stays():
    assert [op.kind for op in fused(ops.Linear(X, (Y,), (W1,)), ops.Add(Y, Y, OUT))] == [
        "Linear",
        "Add",
    ]
