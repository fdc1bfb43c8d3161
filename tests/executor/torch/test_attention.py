"""Paged attention of the torch backend on the CPU against the reference, over the shapes and masks
that native is tested with.

|torch - reference| <= 5e-5 for values of size one whatever the cache's precision, because both read
the same stored numbers.
"""

import numpy as np
import pytest

from octavo.executor.base import BackendOptions
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.torch.attention import sdpa
from octavo.executor.torch.backend import TorchBackend
from octavo.program import ops
from octavo.program.program import Weight
from tests.executor.native.test_attention import HEADS, MASKS, Run, Shape, chunks, mixed
from tests.executor.test_key_indices import attention_program, logits

TOLERANCE = 5e-5


def backend_of(kv="fp32", **options):
    return TorchBackend(
        BackendOptions(num_threads=1, kv_cache_dtype=kv, dtype="float32", **options)
    )


def expected(shape, kv="fp32"):
    return Run(shape, ReferenceBackend(BackendOptions(kv_cache_dtype=kv))).whole()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("name", [*HEADS, *MASKS])
def test_shapes_and_masks(name, kv):
    shape = {**HEADS, **MASKS}[name]
    wanted = expected(shape, kv)
    np.testing.assert_allclose(
        Run(shape, backend_of(kv)).whole(pad=2), wanted, rtol=TOLERANCE, atol=TOLERANCE
    )
    if shape.mask != "full":
        np.testing.assert_allclose(
            Run(shape, backend_of(kv)).steps(mixed(shape), pad=2),
            wanted,
            rtol=TOLERANCE,
            atol=TOLERANCE,
        )


@pytest.mark.parametrize("name", ["causal", "window", "softcap", "sinks in a window"])
def test_scores_made_in_parts(name, monkeypatch):
    """Scores that exceed the limit are computed some rows, or some requests, at a time."""
    monkeypatch.setattr(sdpa, "MOST_SCORES", 3000)
    shape = MASKS[name]
    wanted = expected(shape)
    np.testing.assert_allclose(
        Run(shape, backend_of()).whole(), wanted, rtol=TOLERANCE, atol=TOLERANCE
    )
    together = [
        [(r, at, at + 1) for r, n in enumerate(shape.contexts) if at < n]
        for at in range(max(shape.contexts))
    ]
    np.testing.assert_allclose(
        Run(shape, backend_of()).steps(together), wanted, rtol=TOLERANCE, atol=TOLERANCE
    )


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", ["causal", "window over splits", "sinks in a window"])
def test_batch_invariant_rows_are_bitwise_alone(name):
    shape = MASKS[name]
    whole = Run(shape, backend_of("bf16", batch_invariant=True)).whole()
    for steps in (mixed(shape), chunks(shape, 16)):
        run = Run(shape, backend_of("bf16", batch_invariant=True), seed=3)
        np.testing.assert_array_equal(run.steps(steps, pad=2), whole)


def test_what_earlier_requests_left_in_a_block_is_not_seen():
    """NaN keys and values that an earlier request left in a block do not reach a result."""
    shape = Shape(contexts=(40, 40))
    wanted = Run(shape, backend_of()).step([(0, 0, 21)])
    used = Run(shape, backend_of())
    used.tables[1] = used.tables[0]
    for at in range(40):
        used.first[1] = shape.num_tokens - at
        assert np.isnan(used.step([(1, at, at + 1)])).all()
    np.testing.assert_array_equal(used.step([(0, 0, 21)]), wanted)


def test_keys_out_of_the_window_are_not_read():
    """Blocks before the window may be freed: a table entry of -1 there changes nothing."""
    shape = Shape(mask="window", window=37, contexts=(100,))
    run = Run(shape, backend_of())
    wanted = run.whole()[99]
    run.tables[0] = run.tables[0].copy()
    run.tables[0][:3] = -1
    np.testing.assert_allclose(run.step([(0, 99, 100)])[0], wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "bias",
    [
        ops.AlibiBias((0.5, 0.25, 0.1, 0.0)),
        ops.T5Bias(Weight("buckets", (12, 4)), 12, 30, bidirectional=False),
    ],
    ids=["alibi", "t5"],
)
def test_a_bias_is_added_behind_the_softcap(bias):
    program = attention_program(None, softcap=2.0, bias=bias)
    wanted = logits("reference", program)
    found = logits("torch", program)
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE * abs(wanted).max())
