"""Random Programs on the native backend against the reference: stages, reused memory, heads over
many chunks of sampled rows.

Within 1e-3 of the largest number a Program makes anywhere (fp32 sums of numbers that large, then
norms that enlarge them); on any number of threads bitwise the same.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.executor.base import BackendOptions
from octavo.executor.batch import StepBatch
from octavo.executor.native.backend import NativeBackend
from octavo.executor.reference.backend import ReferenceBackend
from octavo.quant.packed import PackedWeight
from tests.support.native_harness import require_native
from tests.support.random_programs import NUM_ROWS, random_programs
from tests.support.tiers import examples


def batch_of(rows, samples):
    """Two rows of NaN behind the others; sampled rows may repeat."""
    return StepBatch(
        token_ids=np.concatenate([np.arange(rows), [NUM_ROWS] * 2]).astype(np.int32),
        key_indices=np.concatenate([np.arange(rows), [-1] * 2]).astype(np.int32),
        positions=np.concatenate([np.arange(rows), [-1] * 2])[None].astype(np.int32),
        query_starts=np.array([0, rows], np.int32),
        context_lens=np.array([[rows]], np.int32),
        slots=np.concatenate([np.arange(rows), [-1] * 2])[None].astype(np.int32),
        block_tables=np.arange(8, dtype=np.int32)[None, None],
        sample_rows=np.array([index % rows for index in range(samples)], np.int32),
    )


def logits_of(backend, made, batch):
    runnable = backend.prepare_program(
        made.program, lambda weight: PackedWeight.plain(made.weights[weight.name])
    )
    return runnable.run(
        batch, backend.allocate(runnable.kv_layouts, [8] * len(made.program.groups))
    ).arrays["logits"]


@settings(max_examples=examples(30), deadline=None)
@given(random_programs(), st.integers(1, NUM_ROWS), st.sampled_from([1, 5, 64, 65, 200]))
def test_random_programs(made, rows, samples):
    require_native()
    batch = batch_of(rows, samples)
    wanted = logits_of(ReferenceBackend(), made, batch)
    options = BackendOptions(max_tokens=NUM_ROWS + 2, kv_cache_dtype="fp32")
    found = logits_of(NativeBackend(options), made, batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3 * max(1.0, abs(wanted).max()))
    threaded = BackendOptions(max_tokens=NUM_ROWS + 2, kv_cache_dtype="fp32", num_threads=3)
    np.testing.assert_array_equal(logits_of(NativeBackend(threaded), made, batch), found)
