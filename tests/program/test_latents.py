"""The pass that absorbs latents, and what it makes of them on the native backend."""

import pytest

from octavo.api.errors import BackendUnavailable
from octavo.checkpoint.open import open_checkpoint
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.models.registry import build_programs
from octavo.program import ops
from octavo.program.passes.latents import absorb_latents
from tests.support.native_harness import require_native
from tests.support.tiny_models import tiny_model


def program():
    return build_programs(open_checkpoint(tiny_model("deepseek_v3").path).config)["decoder"]


def test_heads_share_latents_as_one_kv_head():
    """Each latent attention reads the columns of its keys as values, and nothing else is stored."""
    whole = program()
    absorbed = absorb_latents(whole)
    count = sum(isinstance(op, ops.MlaAttention) for op in whole.ops)
    attentions = [op for op in absorbed.ops if isinstance(op, ops.Attention)]
    assert len(attentions) == count > 0
    for op in attentions:
        group = absorbed.group(op.group)
        assert (group.num_kv_heads, group.v_width) == (1, 0)
        assert op.q.width == op.num_heads * group.k_width
        assert op.out.width == op.num_heads * op.latent_width < op.q.width
    heads = [op for op in absorbed.ops if isinstance(op, ops.HeadLinear)]
    assert [op.transposed for op in heads] == [True, False] * count


@pytest.mark.parametrize("dtype", ["int8", "k8v4", "int4"])
def test_a_latent_cache_of_codes_is_refused_by_name(dtype):
    require_native()
    backend = NativeBackend(BackendOptions(kv_cache_dtype=dtype))
    with pytest.raises(BackendUnavailable, match=f"latents as fp32 or bf16, got {dtype}"):
        backend.footprint(program(), lambda weight: "F32")
