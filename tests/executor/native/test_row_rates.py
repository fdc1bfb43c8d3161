"""The rates that `octavo plan` estimates decoding from are measured for every format and level."""

from pathlib import Path

import pytest

from octavo.checkpoint.open import open_checkpoint
from octavo.executor.native.backend import make_kv_layout
from octavo.executor.native.extension import native_module, supported_levels
from octavo.executor.native.formats import FORMATS, get_matrices
from octavo.executor.native.row_rates import (
    RowAttention,
    RowProduct,
    kv_rate,
    row_attention,
    row_products,
    row_rates,
    stage_seconds,
    stream_rounds,
)
from octavo.models.registry import build_programs
from octavo.program.expert_ops import GroupedLinear
from octavo.program.ops import Attention, Linear
from octavo.program.passes.fuse import fuse
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize("level", supported_levels())
def test_rates_of_every_format(level):
    native = native_module()
    device = native.Device(2, str(Path(native.__file__).parent), level)
    products = [RowProduct(each, 256, 1 << 16) for each in FORMATS.values()]
    rates = row_rates(device, [*products, "another backend's"], 1 << 20)
    assert set(rates) == set(products)
    assert all(1e6 < rate < 1e12 for rate in rates.values())
    rounds = stream_rounds(device, FORMATS["Q6_K"], 96, 1, 3)
    assert len(rounds) == 3
    assert all(read > 0 and product > 0 for read, product in rounds)
    assert 0 < stage_seconds(device, 2) < 1


@pytest.mark.parametrize("level", supported_levels())
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_rate_of_attention(level, dtype):
    native = native_module()
    device = native.Device(2, str(Path(native.__file__).parent), level)
    assert 1e6 < kv_rate(device, RowAttention(dtype, 6, 2, 24, 16), 1 << 20) < 1e12
    assert kv_rate(device, None, 1 << 20) is None


def test_a_weight_is_read_by_the_product_of_its_op():
    """Matrices that one op multiplies with make one product; of experts a token reads its own."""
    config = open_checkpoint(tiny_model("qwen2_moe").path).config
    program = fuse(build_programs(config)["decoder"])
    formats = {weight: FORMATS["Q4_0"] for op in program.ops for weight in get_matrices(op)}
    products = row_products(program, formats, dict.fromkeys(program.weights, 6000))
    linear = next(op for op in program.ops if isinstance(op, Linear) and len(op.weights_) == 3)
    assert {products[weight].num_bytes for weight in linear.weights_} == {18_000}
    experts = next(op for op in program.ops if isinstance(op, GroupedLinear))
    share = experts.ids.width / experts.weight.shape[0]
    assert 0 < share < 1
    wanted = round(6000 * len(experts.matrices) * share)
    assert products[experts.weight] == RowProduct(FORMATS["Q4_0"], experts.weight.shape[-1], wanted)


def test_the_attention_of_most_layers_is_measured():
    program = build_programs(open_checkpoint(tiny_model("gpt_oss").path).config)["decoder"]
    layouts = [make_kv_layout(group, "int8") for group in program.groups]
    op = next(op for op in program.ops if isinstance(op, Attention))
    group = next(group for group in program.groups if group.name == op.group)
    assert row_attention(program, layouts) == RowAttention(
        "int8", op.num_heads, group.num_kv_heads, group.k_width, group.v_width
    )
    mamba = build_programs(open_checkpoint(tiny_model("mamba").path).config)["decoder"]
    assert row_attention(mamba, [make_kv_layout(group, "fp32") for group in mamba.groups]) is None
