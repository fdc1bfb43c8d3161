"""What weighs stored prefixes: a part of a Program beside the whole, which makes the queries of one
layer by the same weights.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.engine.protocol.kv_messages import BlockQuery
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.reference.backend import ReferenceBackend
from octavo.models.registry import build_programs
from octavo.program.program import Weight
from octavo.sparsity.passes.probe_prefixes import get_probe, probe_prefixes, probing_part
from octavo.sparsity.prefix_weigher import NUM_BLOCKS, PrefixWeigher
from tests.support.native_harness import require_native
from tests.support.tiny_models import tiny_model

TOKENS = [5, 9, 2, 40, 7, 33, 21, 8, 60, 3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
ASKED = BlockQuery("one", TOKENS, [*range(16), 200, 201, 202], 3, group=0, slots=[])


def queries(family: str, backend: NativeBackend | ReferenceBackend) -> Any:
    """Returns the queries of a text, once each weight has been loaded once."""
    checkpoint = open_checkpoint(tiny_model(family).path)
    program = probe_prefixes(build_programs(checkpoint.config)["decoder"])
    reader = WeightReader(checkpoint, "auto", None, program)
    loads: Counter[Weight] = Counter()

    def load(weight: Weight) -> Any:
        loads[weight] += 1
        return reader.load(weight)

    part = probing_part(program)
    whole, prepared = backend.prepare_program_with_part(program, part, load, part_tokens=32)
    assert set(loads) == set(program.weights) and set(loads.values()) == {1}
    probe = get_probe(program)
    kv = backend.allocate(prepared.kv_layouts, [NUM_BLOCKS] * len(prepared.kv_layouts))
    layout = whole.kv_layouts[probe.group]
    return PrefixWeigher(backend, prepared, kv, layout, probe).prepare_query(ASKED)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "qwen3_moe"])
def test_the_part_shares_the_weights_and_makes_the_queries(family):
    require_native()
    native = NativeBackend(BackendOptions(dtype="float32", num_threads=2, max_tokens=64))
    found, expected = queries(family, native), queries(family, ReferenceBackend())
    assert found is not None and found.shape[0] == 3
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
