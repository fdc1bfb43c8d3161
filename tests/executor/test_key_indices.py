"""Key indices and positions are independent: attention masks use only the key indices, RoPE and
learned embeddings only the positions.

Bitwise, on every backend: what an op must not read is replaced by other numbers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.executor.base import BackendOptions
from octavo.executor.batch import StepBatch
from octavo.executor.native.backend import NativeBackend
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.program import ops
from octavo.program.builder import Builder
from octavo.program.ops import RopeTable
from octavo.program.program import CacheGroup, Weight
from octavo.quant.packed import PackedWeight
from tests.support.native_harness import require_native

VOCABULARY = 40
HEADS, HEAD_WIDTH = 4, 16
LENGTHS = (37, 1, 20)
ROPE = RopeTable((1.0, 0.3, 0.1, 0.03))


def options(**given):
    return BackendOptions(num_threads=1, kv_cache_dtype="fp32", **given)


def backend_of(name):
    if name == "native":
        require_native()
        return NativeBackend(options())
    return ReferenceBackend(options()) if name == "reference" else TorchBackend(options())


def load(weight):
    seed = sum(map(ord, weight.name))
    return PackedWeight.plain(
        np.random.default_rng(seed).normal(size=weight.shape).astype(np.float32)
    )


def attention_program(window, **attributes):
    """Builds a Program whose rows are told apart by their tokens and by what they attend to."""
    group = CacheGroup("kv", "window" if window else "full", 1, 2, HEAD_WIDTH, HEAD_WIDTH, window)
    b = Builder("test", (group,), VOCABULARY)
    x = b.embedding(b.token_ids(), "table", VOCABULARY, 32)
    k, v = (b.linear(x, name, 2 * HEAD_WIDTH) for name in "kv")
    b.kv_write("kv", 0, (k,), v)
    q = b.linear(x, "q", HEADS * HEAD_WIDTH)
    mask = "window" if window else attributes.pop("mask", "causal")
    x = b.attention(q, "kv", 0, num_heads=HEADS, scale=0.1, mask=mask, **attributes)
    return b.finish(logits=b.linear(b.gather_rows(x), "head", VOCABULARY))


def positions_program():
    """Builds a Program of a rotated row and a learned position, without attention."""
    b = Builder("test", (CacheGroup("kv", "full", 1, 1, 2, 2),), VOCABULARY)
    ids = b.token_ids()
    x = b.embedding(ids, "table", VOCABULARY, 32)
    x = b.add(b.rope(x, 2, ROPE), b.position_embedding("learned", 64, 32, offset=2))
    return b.finish(logits=b.linear(b.gather_rows(x), "head", VOCABULARY))


def batch_of(spans):
    """Makes a step of the rows first .. end - 1 of each request, whose blocks are its own, and one
    row of padding.
    """
    at = [np.arange(first, end) for first, end in spans]
    blocks = np.arange(9, dtype=np.int32).reshape(1, 3, 3)
    slots = [blocks[0, r, part // 16] * 16 + part % 16 for r, part in enumerate(at)]
    key_indices = np.concatenate([*at, [0]]).astype(np.int32)
    return StepBatch(
        token_ids=((key_indices * 7 + 3) % VOCABULARY).astype(np.int32),
        key_indices=key_indices,
        positions=key_indices[None],
        query_starts=np.cumsum([0, *map(len, at)]).astype(np.int32),
        context_lens=np.array([[end for _, end in spans]], np.int32),
        slots=np.concatenate([*slots, [-1]])[None].astype(np.int32),
        block_tables=blocks,
        sample_rows=np.arange(len(key_indices) - 1, dtype=np.int32),
    )


def steps():
    """Yields whole prompts, then one decode step of each request."""
    yield batch_of([(0, length) for length in LENGTHS])
    yield batch_of([(length, length + 1) for length in LENGTHS])


def logits(name, program, change=lambda batch: batch):
    backend = backend_of(name)
    runnable = backend.prepare_program(program, load)
    kv = backend.allocate(runnable.kv_layouts, [9])
    return np.concatenate([runnable.run(change(batch), kv).arrays["logits"] for batch in steps()])


def shifted_positions(batch):
    """Moves the positions far on and apart, as an axis of an image may have them."""
    return replace(batch, positions=(batch.key_indices[None] * 3 + 11).astype(np.int32))


def other_key_indices(batch):
    return replace(batch, key_indices=(batch.key_indices // 2).astype(np.int32))


BACKENDS = pytest.mark.parametrize("backend", ["reference", "native", "torch"])

ATTENTION = {
    "causal": attention_program(None),
    "window": attention_program(9),
    "full": attention_program(None, mask="full"),
    "softcap": attention_program(None, softcap=2.0),
    "alibi": attention_program(None, bias=ops.AlibiBias((0.5, 0.25, 0.1, 0.0))),
    "t5": attention_program(
        None, bias=ops.T5Bias(Weight("buckets", (12, HEADS)), 12, 30, bidirectional=False)
    ),
}


@pytest.mark.parametrize(
    ("backend", "kind"),
    [(backend, kind) for backend in ("reference", "native", "torch") for kind in ATTENTION],
)
def test_attention_depends_on_places_alone(backend, kind):
    found = logits(backend, ATTENTION[kind], shifted_positions)
    np.testing.assert_array_equal(found, logits(backend, ATTENTION[kind]))


@BACKENDS
@pytest.mark.parametrize("kind", ["causal", "window"])
def test_attention_follows_the_key_indices(backend, kind):
    """Other key indices make other keys visible, so the test above is not empty."""
    found = logits(backend, ATTENTION[kind], other_key_indices)
    assert abs(found - logits(backend, ATTENTION[kind])).max() > 0.01


@BACKENDS
def test_rope_and_learned_embeddings_depend_on_positions_alone(backend):
    program = positions_program()
    plain = logits(backend, program)
    np.testing.assert_array_equal(logits(backend, program, other_key_indices), plain)
    turned = logits(
        backend, program, lambda batch: replace(batch, positions=(batch.key_indices[None] + 5))
    )
    assert abs(turned - plain).max() > 0.01


@BACKENDS
def test_the_first_axis_of_several_is_the_one_that_is_read(backend):
    """A batch may bring more axes of positions than a Program's ops ask for."""

    def three_axes(batch):
        return replace(
            batch,
            positions=np.stack([batch.key_indices, batch.key_indices * 2, batch.key_indices + 9]),
        )

    program = positions_program()
    np.testing.assert_array_equal(logits(backend, program, three_axes), logits(backend, program))
