"""FlashInfer's attention as a choice: which pages it is given of a step, shown by a stand-in that
computes the plain formula from them.

|torch - reference| <= 1e-2 for values of size one: queries and outputs are bf16. The kernels
themselves need a CUDA device and the package.
"""

import importlib.util

import numpy as np
import pytest
import torch

from octavo.api.errors import BackendUnavailable
from octavo.executor import devices
from octavo.executor.base import BackendOptions
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.torch.attention.flashinfer import FlashInfer
from octavo.executor.torch.backend import TorchBackend
from octavo.program import ops
from octavo.program.program import Value, Weight
from tests.executor.native.test_attention import Run, Shape, chunks, mixed

TOLERANCE = 1e-2
CPU = torch.device("cpu")
MISSING = (
    "needs a CUDA device" if not torch.cuda.is_available() else "flashinfer-python is not installed"
)
REAL = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None, reason=MISSING
)

SHAPES = {
    "causal": Shape(k_width=64, v_width=64),
    "one kv head": Shape(heads=6, kv_heads=1, k_width=128, v_width=128, contexts=(33, 1, 90)),
    "as many kv heads": Shape(heads=3, kv_heads=3, k_width=64, v_width=64, contexts=(16, 17, 40)),
    "window": Shape(mask="window", window=37, k_width=64, v_width=64),
    "window of blocks": Shape(mask="window", window=16, k_width=64, v_width=64),
    "softcap": Shape(softcap=2.5, k_width=64, v_width=64, sharpness=3.0),
    "full": Shape(mask="full", k_width=64, v_width=64, contexts=(5, 48, 70)),
}


class Wrapper:
    """The common part of the stand-ins for FlashInfer's paged wrappers; `plans` and `runs` count
    calls.
    """

    def __init__(self, workspace, kv_layout, use_tensor_cores=None):
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD"
        self.plans = self.runs = 0

    def _keep(
        self,
        query_starts,
        indptr,
        indices,
        last_page_len,
        heads,
        kv_heads,
        width,
        page_size,
        options,
        *,
        causal,
    ):
        for array in (query_starts, indptr, indices, last_page_len):
            assert array.dtype == torch.int32 and array.device.type == "cpu", (
                "planned without a word from the device"
            )
        assert (
            indptr[0] == query_starts[0] == 0
            and indptr[-1] == len(indices)
            and len(indptr) == len(last_page_len) + 1 == len(query_starts)
        )
        assert (
            page_size == 16
            and last_page_len.min() >= 1
            and last_page_len.max() <= page_size
            and (indptr.diff() > 0).all()
        )
        assert set(options) == {
            "sm_scale",
            "window_left",
            "logits_soft_cap",
            "q_data_type",
            "kv_data_type",
        }
        self.pages, self.sizes, self.options, self.causal = (
            (query_starts, indptr, indices, last_page_len),
            (heads, kv_heads, width),
            options,
            causal,
        )
        self.plans += 1

    def run(self, q, kv):
        heads, kv_heads, width = self.sizes
        query_starts, indptr, indices, last_page_len = self.pages
        assert (
            q.shape == (query_starts[-1], heads, width)
            and q.is_contiguous()
            and q.dtype == self.options["q_data_type"]
        )
        assert all(
            part.shape[1:] == (16, kv_heads, width) and part.dtype == self.options["kv_data_type"]
            for part in kv
        )
        self.runs += 1
        out = torch.empty_like(q)
        for r in range(len(last_page_len)):
            pages = indices[indptr[r] : indptr[r + 1]].long()
            length = 16 * (len(pages) - 1) + int(last_page_len[r])
            k, v = (
                part[pages]
                .flatten(0, 1)[:length]
                .double()
                .repeat_interleave(heads // kv_heads, dim=1)
                for part in kv
            )
            a, b = int(query_starts[r]), int(query_starts[r + 1])
            out[a:b] = self._attend(q[a:b].double(), k, v).to(q.dtype)
        return out

    def _attend(self, q, k, v):
        """Computes the formula, with the last query at the last key."""
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.options["sm_scale"]
        if cap := self.options["logits_soft_cap"]:
            scores = cap * torch.tanh(scores / cap)
        at, keys = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
        seen = keys <= at if self.causal else torch.ones(len(q), len(k), dtype=torch.bool)
        if self.options["window_left"] >= 0:
            seen = seen & (keys >= at - self.options["window_left"])
        return torch.einsum(
            "hqk,khd->qhd", torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1), v
        )


class Decode(Wrapper):
    def plan(self, indptr, indices, last_page_len, heads, kv_heads, width, page_size, **options):
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._keep(
            starts,
            indptr,
            indices,
            last_page_len,
            heads,
            kv_heads,
            width,
            page_size,
            options,
            causal=True,
        )


class Prefill(Wrapper):
    def plan(
        self,
        query_starts,
        indptr,
        indices,
        last_page_len,
        heads,
        kv_heads,
        width,
        page_size,
        *,
        causal,
        **options,
    ):
        self._keep(
            query_starts,
            indptr,
            indices,
            last_page_len,
            heads,
            kv_heads,
            width,
            page_size,
            options,
            causal=causal,
        )


class StandIn:
    """Stand-in for FlashInfer's package, computed in PyTorch; keeps each wrapper that it makes."""

    def __init__(self):
        self.made = []

    def BatchDecodeWithPagedKVCacheWrapper(self, *arguments, **options):
        return self._kept(Decode(*arguments, **options))

    def BatchPrefillWithPagedKVCacheWrapper(self, *arguments, **options):
        return self._kept(Prefill(*arguments, **options))

    def _kept(self, wrapper):
        self.made.append(wrapper)
        return wrapper


def backend_of(choice, device="cpu", **options):
    return TorchBackend(
        BackendOptions(num_threads=1, kv_cache_dtype="bf16", dtype="float32", **options),
        device,
        attention=(choice,),
    )


def expected(shape):
    return Run(shape, ReferenceBackend(BackendOptions(kv_cache_dtype="bf16")), rounded=True).whole()


def decoded(shape):
    """Returns steps that compute the last row of each request alone, behind its prompt; requests of
    one token have no prompt.
    """
    return [
        [(r, 0, n - 1) for r, n in enumerate(shape.contexts) if n > 1],
        [(r, n - 1, n) for r, n in enumerate(shape.contexts)],
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_its_pages_say_what_the_step_says(name):
    shape = SHAPES[name]
    package = StandIn()
    wanted, choice = expected(shape), FlashInfer(package, CPU)
    np.testing.assert_allclose(
        Run(shape, backend_of(choice)).whole(pad=2), wanted, rtol=TOLERANCE, atol=TOLERANCE
    )
    if shape.mask != "full":
        for steps in (mixed(shape), chunks(shape, 16), decoded(shape)):
            run = Run(shape, backend_of(choice), seed=3)
            np.testing.assert_allclose(
                run.steps(steps, pad=2), wanted, rtol=TOLERANCE, atol=TOLERANCE
            )
        assert {type(wrapper) for wrapper in package.made} == {Decode, Prefill}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", ["causal", "window"])
def test_batch_invariant_rows_are_bitwise_alone(name):
    shape, choice = SHAPES[name], FlashInfer(StandIn(), CPU)
    whole = Run(shape, backend_of(choice, batch_invariant=True)).whole()
    run = Run(shape, backend_of(choice, batch_invariant=True), seed=3)
    np.testing.assert_array_equal(run.steps(mixed(shape), pad=2), whole)


def test_layers_that_are_alike_are_planned_once_a_step():
    from tests.support.paged_runner import PagedRunner
    from tests.support.tiny_models import tiny_model

    package = StandIn()
    choice = FlashInfer(package, CPU)
    path = tiny_model("gemma3_text", head_dim=64).path
    runner = PagedRunner(path, backend_of(choice))
    found = runner.logits(np.arange(5, 45), chunk=20)
    assert sorted((wrapper.plans, wrapper.runs) for wrapper in package.made) == [
        (2, 2),
        (2, 6),
    ], "two steps; one full layer, three windows"
    wanted = PagedRunner(path, ReferenceBackend(BackendOptions(kv_cache_dtype="bf16"))).logits(
        np.arange(5, 45)
    )
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.02 * abs(wanted).max()


def test_keys_out_of_the_window_are_not_asked_for():
    """Blocks before the window may be freed: a table entry of -1 there is never asked for."""
    shape = Shape(mask="window", window=37, contexts=(100,), k_width=64, v_width=64)
    run = Run(shape, backend_of(FlashInfer(StandIn(), CPU)))
    wanted = run.whole()[99]
    run.tables[0] = run.tables[0].copy()
    run.tables[0][:3] = -1
    np.testing.assert_allclose(run.step([(0, 99, 100)])[0], wanted, rtol=TOLERANCE, atol=TOLERANCE)


X, Y = (Value(name, "tokens", 128) for name in "xy")
ALIBI = ops.AlibiBias((1.0, 0.5))
REFUSED = [
    (
        ops.Attention(X, Y, "kv", 0, 2, 1.0, sinks=Weight("sinks", (2,))),
        torch.bfloat16,
        "attention sinks are not supported",
    ),
    (ops.Attention(X, Y, "kv", 0, 2, 1.0, bias=ALIBI), torch.bfloat16, "no support for AlibiBias"),
    (
        ops.Attention(X, Y, "kv", 0, 4, 1.0),
        torch.bfloat16,
        "heads are 32 wide (values 32), it has 64, 128, 256",
    ),
    (
        ops.Attention(X, Value("y", "tokens", 64), "kv", 0, 2, 1.0),
        torch.bfloat16,
        "heads are 64 wide (values 32)",
    ),
    (
        ops.Attention(X, Y, "kv", 0, 2, 1.0),
        torch.int8,
        "K and V are in int8, supported: bfloat16 and float16",
    ),
    (ops.Attention(X, Y, "kv", 0, 2, 1.0), torch.float8_e4m3fn, "K and V are in float8_e4m3fn"),
    (ops.Attention(X, Y, "kv", 0, 2, 1.0), torch.float32, "K and V are in float32"),
    (object(), torch.bfloat16, "MLA is not supported"),
]


@pytest.mark.parametrize(("op", "kv_dtype", "why"), REFUSED)
def test_what_it_cannot_take_it_refuses_by_name(op, kv_dtype, why):
    assert why in FlashInfer(StandIn(), CPU).refusal(op, kv_dtype)


def test_a_program_that_it_cannot_run_is_refused_when_it_is_prepared():
    shape = Shape(k_width=64, v_width=64, sinks=True)
    with pytest.raises(
        BackendUnavailable, match="attention with flashinfer: attention sinks are not supported"
    ):
        Run(shape, backend_of(FlashInfer(StandIn(), CPU)))


def test_without_cuda_or_the_package_the_error_says_what_to_do(monkeypatch):
    with pytest.raises(
        BackendUnavailable,
        match=r"flashinfer requires a CUDA device, got cpu\nhint: --attention-backend sdpa",
    ):
        TorchBackend(BackendOptions(attention_backend="flashinfer"))
    monkeypatch.setattr(
        devices,
        "import_module",
        lambda name: (_ for _ in ()).throw(ImportError(f"No module named {name!r}")),
    )
    with pytest.raises(
        BackendUnavailable,
        match=r"No module named 'flashinfer'\nhint: pip install flashinfer-python",
    ):
        devices.require_flashinfer()


@REAL
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_themselves(name):
    shape = SHAPES[name]
    backend = TorchBackend(
        BackendOptions(kv_cache_dtype="bf16", dtype="float32", attention_backend="flashinfer"),
        "cuda",
    )
    steps = (
        [[(r, 0, n) for r, n in enumerate(shape.contexts)]]
        if shape.mask == "full"
        else mixed(shape)
    )
    np.testing.assert_allclose(
        Run(shape, backend).steps(steps), expected(shape), rtol=2 * TOLERANCE, atol=2 * TOLERANCE
    )
