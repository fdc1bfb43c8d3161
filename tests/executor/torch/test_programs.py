"""The torch backend on the CPU against the reference: every family's logits, random Programs,
packed weights.

In fp32 within 3e-5 of the largest logit; in bf16 and fp16, where every Value is rounded, within 6%
and 1%. Weights that are packed are the same floats bit for bit.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.api.errors import BackendUnavailable
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.base import BackendOptions
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.torch.attention import choose
from octavo.executor.torch.attention.sdpa import Sdpa
from octavo.executor.torch.backend import TorchBackend
from octavo.executor.torch.weights.device_weight import DeviceWeight
from octavo.models.registry import build_programs
from octavo.program import family_ops, ops, rank_ops
from octavo.program.builder import Builder
from octavo.program.program import CacheGroup, Program, Value, Weight
from octavo.quant.gguf import BLOCK_TYPES
from octavo.quant.online import pack_fp8, pack_int4, pack_int8
from octavo.quant.packed import Levels, PackedWeight
from tests.executor.native.test_programs import batch_of, logits_of
from tests.models.test_families import CASES
from tests.models.test_t5 import logits as t5_logits
from tests.support.kv_layouts import layouts_of
from tests.support.paged_runner import PagedRunner
from tests.support.random_programs import NUM_ROWS, RandomProgram, random_programs
from tests.support.tiers import examples
from tests.support.tiny_models import tiny_model

torch.set_num_threads(1)

CPU = torch.device("cpu")
BOUNDS = {"float32": 3e-5, "bfloat16": 0.06, "float16": 0.01}


def torch_backend(**options):
    return TorchBackend(BackendOptions(num_threads=1, **options))


def tokens(tiny, length=270):
    config = tiny.config.get("text_config", tiny.config)
    return np.random.default_rng(1).integers(0, config["vocab_size"], length)


def assert_close(found, wanted, bound):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound * abs(wanted).max())


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("case", CASES)
def test_families_in_chunks_beside_padding(case):
    family, overrides = CASES[case]
    tiny = tiny_model(family, **overrides)
    wanted = PagedRunner(tiny.path).logits(tokens(tiny))
    runner = PagedRunner(tiny.path, torch_backend(), padding=2)
    assert_close(runner.logits(tokens(tiny), 37), wanted, BOUNDS["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gpt_oss", "deepseek_v3"])
def test_half_precisions(family, dtype):
    """Bounds are of the root of the mean square, because a token that is routed to other experts
    has logits far off.
    """
    tiny = tiny_model(family)
    load = WeightReader(open_checkpoint(tiny.path), dtype).load
    wanted = PagedRunner(tiny.path, load=load).logits(tokens(tiny))
    found = PagedRunner(tiny.path, torch_backend(dtype=dtype), load=load).logits(tokens(tiny))
    assert np.sqrt(np.mean((found - wanted) ** 2)) < BOUNDS[dtype] * abs(wanted).max()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_packed_models(quantization):
    path = tiny_model("llama", hidden_size=64, intermediate_size=96).path
    checkpoint = open_checkpoint(path)
    load = WeightReader(
        checkpoint, "auto", quantization, build_programs(checkpoint.config)["decoder"]
    ).load
    ids = np.random.default_rng(1).integers(0, 320, 50)
    assert_close(
        PagedRunner(path, torch_backend(), load=load).logits(ids),
        PagedRunner(path, load=load).logits(ids),
        BOUNDS["float32"],
    )


@pytest.mark.parametrize("padding", [0, 3])
def test_encoder_and_decoder(padding):
    path = tiny_model("t5").path
    wanted = t5_logits(PagedRunner(path))
    for chunk in (40, 7, 1):
        assert_close(
            t5_logits(PagedRunner(path, torch_backend(), padding=padding), chunk),
            wanted,
            BOUNDS["float32"],
        )


@settings(max_examples=examples(10), deadline=None)
@given(random_programs(), st.integers(1, NUM_ROWS), st.sampled_from([1, 5, 128, 129, 300]))
def test_random_programs(made, rows, samples):
    batch = batch_of(rows, samples)
    wanted = logits_of(ReferenceBackend(), made, batch)
    np.testing.assert_allclose(
        logits_of(torch_backend(), made, batch),
        wanted,
        rtol=1e-3,
        atol=1e-3 * max(1.0, abs(wanted).max()),
    )


def test_activations_without_kernels():
    b = Builder("test", (CacheGroup("kv", "full", 1, 1, 2, 2),), NUM_ROWS)
    x = b.embedding(b.token_ids(), "embed", NUM_ROWS, 16)
    y = b.like("activated", x)
    names = ("alpha_p", "alpha_n", "beta", "eps")
    b.append(family_ops.Xielu(x, y, *(Weight(name, (1,)) for name in names)))
    y = b.add(y, b.act(x, "softplus"))
    program = b.finish(logits=b.linear(b.gather_rows(y), "head", NUM_ROWS))
    weights = {
        weight.name: np.random.default_rng(i).normal(size=weight.shape).astype(np.float32)
        for i, weight in enumerate(program.weights)
    }
    made, batch = RandomProgram(program, weights), batch_of(9, 9)
    wanted = logits_of(ReferenceBackend(), made, batch)
    np.testing.assert_allclose(logits_of(torch_backend(), made, batch), wanted, 1e-4, 1e-4)


@pytest.mark.parametrize("mode", ["last", "cls", "mean"])
def test_pooled_rows(mode):
    x, out = Value("x", "tokens", 8), Value("out", "requests", 8)
    group = CacheGroup("kv", "full", 1, 1, 2, 2)
    program = Program(
        "test", {"hidden": x}, {"pooled": out}, (ops.PoolRows(x, out, mode),), (group,)
    )
    batch = batch_of(9, 0)
    batch.query_starts, batch.context_lens = (
        np.array([0, 4, 9], np.int32),
        np.array([[4, 5]], np.int32),
    )
    batch.hidden = (
        np.random.default_rng(0).normal(size=(len(batch.token_ids), 8)).astype(np.float32)
    )
    found, wanted = (
        backend.prepare_program(program, lambda weight: None)
        .run(batch, backend.allocate(layouts_of(backend, (group,)), [8]))
        .arrays["pooled"]
        for backend in (torch_backend(), ReferenceBackend())
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def formats():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 5, 256)).astype(np.float32)
    for kind in BLOCK_TYPES.values():
        if kind.dtype is None:
            raw = rng.integers(0, 256, kind.num_bytes((5, 512)), np.uint8)
            yield kind.name, kind.tensor(raw, (5, 512)).packed()
        else:
            yield kind.name, PackedWeight.plain(values.astype(kind.dtype))
    yield "int8", pack_int8(values[:, :, :70].copy())
    yield "int4", pack_int4(values)
    yield "fp8", pack_fp8(values[:, :, :70].copy())
    codes, scales = (
        rng.integers(0, 256, (4, 32), np.uint8),
        Levels(rng.normal(size=(4, 4)).astype(np.float16)),
    )
    table, order = rng.normal(size=16).astype(np.float32), rng.permutation(64).astype(np.int32)
    yield (
        "lookup",
        PackedWeight(
            (4, 64), 4, "lookup", codes, 16, scales, lookup=table, input_permutation=order
        ),
    )


@pytest.mark.parametrize(
    ("name", "packed"), list(formats()), ids=lambda part: part if isinstance(part, str) else ""
)
def test_packed_weights_are_the_same_floats(name, packed):
    with np.errstate(all="ignore"):
        wanted = packed.dequantize()
    found = DeviceWeight.of(packed, CPU, torch.float32)
    np.testing.assert_array_equal(found.floats(torch.float32).numpy(), wanted)
    rows = torch.tensor([2, 0, 2], dtype=torch.int32)
    np.testing.assert_array_equal(found.take(rows).floats(torch.float32).numpy(), wanted[[2, 0, 2]])


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (rank_ops.AllReduce, "the torch backend cannot run the op AllReduce"),
        (
            lambda x, y: ops.Attention(x, y, "kv", 0, 1, 1.0, "tree"),
            "cannot run attention with the mask tree",
        ),
    ],
)
def test_what_it_cannot_run_it_refuses_by_name(op, message):
    x, y = Value("x", "tokens", 8), Value("y", "tokens", 8)
    program = Program(
        "test", {"hidden": x}, {"hidden": y}, (op(x, y),), (CacheGroup("kv", "full", 1, 1, 8, 8),)
    )
    with pytest.raises(BackendUnavailable, match=message):
        torch_backend().prepare_program(program, lambda weight: None)


def test_nothing_is_loaded_of_a_program_that_is_refused(monkeypatch):
    """A refused Program loads no weight, nor does one whose attention no chosen kernels compute."""
    config = open_checkpoint(tiny_model("llama").path).config
    program = build_programs(config)["decoder"]

    def load(weight):
        raise AssertionError(f"{weight.name} was loaded")

    class Refusing(Sdpa):
        def unsupported_reason(self, op, kv_dtype):
            return f"no attention over {kv_dtype}"

    monkeypatch.setitem(choose.MAKERS, "sdpa", lambda options, device: Refusing())
    backend = torch_backend(dtype="float32", attention_backend="sdpa")
    for refuse in (
        lambda: backend.check(program, lambda weight: "F32"),
        lambda: backend.prepare_program(program, load),
    ):
        with pytest.raises(BackendUnavailable, match="no attention over"):
            refuse()


def test_a_precision_of_the_cache_that_it_has_not():
    with pytest.raises(
        BackendUnavailable,
        match="kv_cache_dtype: got int4, the torch backend supports fp32, bf16, int8, fp8",
    ):
        torch_backend(kv_cache_dtype="int4")


def test_a_profile_counts_every_op_and_the_products_bytes():
    runner = PagedRunner(tiny_model("llama").path, torch_backend())
    request, prepared = runner.add(range(20)), runner.runnables["decoder"]
    with pytest.raises(BackendUnavailable, match="profiling was not started"):
        prepared.stop_profile()
    prepared.start_profile()
    runner.step([(request, 0, 20)])
    profile = prepared.stop_profile()
    ops_by_name = {op.name: op for op in profile.ops}
    assert sum(op.calls for op in profile.ops) == len(prepared.program.ops)
    linear = ops_by_name["Linear"]
    weights = sum(
        np.prod(weight.shape)
        for op in prepared.program.ops
        if isinstance(op, ops.Linear)
        for weight in op.weights_
    )
    assert (linear.code, linear.num_bytes, linear.operations) == (
        "fp32",
        4 * weights,
        2 * 20 * weights,
    )
    assert profile.bandwidth > 0 and profile.rates["fp32"] > 0
