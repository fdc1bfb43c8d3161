"""Triton's attention kernels, in its interpreter where there is no GPU, against plain torch and the
reference.

|triton - torch| <= 2e-5 in fp32, 2e-2 in the halves, where results of size one are rounded to 8 or
11 bits, and so are weights on a GPU. With fixed tiles a row has the same bits in any company,
whatever chunks its request comes in.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.executor.base import BackendOptions
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.executor.torch.kv_cache import CODES
from octavo.executor.torch.triton import attention
from octavo.executor.torch.triton.attention import TritonAttention
from tests.executor.native.test_attention import HEADS, MASKS, Run, Shape, chunks, mixed
from tests.executor.torch.triton.attention_case import DEVICE, Case

pytestmark = (
    pytest.mark.slow
)  # Triton's interpreter takes its time; test_models.py and test_rows.py always run

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}

CASES = {
    "causal": Case(),
    "window": Case(window=37),
    "window of one": Case(window=1),
    "window over splits": Case(window=300),
    "full": Case(full=True),
    "softcap": Case(softcap=2.0),
    "sinks": Case(sinks=True),
    "sinks in a window with a softcap": Case(sinks=True, window=5, softcap=30.0),
    "slopes": Case(bias="slopes"),
    "bias by distance": Case(bias="by distance"),
    "bias by distance, both ways": Case(bias="by distance", full=True),
    "all at once": Case(
        sinks=True,
        window=290,
        softcap=3.0,
        bias="slopes",
        heads=6,
        kv_heads=2,
        k_width=80,
        v_width=40,
    ),
    "latent": Case(latent=True, heads=5, kv_heads=1, k_width=40, v_width=24),
    "latent, 24 heads": Case(
        latent=True, heads=24, kv_heads=1, k_width=576, v_width=512, requests=((1, 300), (3, 40))
    ),
    "decode": Case(
        requests=((1, 1), (1, 16), (1, 17), (1, 256), (1, 257), (1, 512), (1, 530)), pad=0
    ),
    "prompts": Case(requests=((1, 1), (16, 16), (17, 17), (257, 257), (2, 513))),
    "chunks": Case(requests=((64, 300), (1, 2), (33, 600))),
    "one prompt": Case(requests=((90, 90),), pad=0),
    "requests without rows or keys": Case(requests=((0, 40), (3, 30), (0, 0), (1, 260), (0, 5))),
}
GROUPS = [(1, 1), (3, 3), (6, 2), (5, 1), (14, 2), (8, 1), (16, 1), (20, 1), (40, 2)]
WIDTHS = [
    (16, 16),
    (7, 13),
    (24, 130),
    (40, 40),
    (64, 64),
    (72, 72),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
]


def assert_close(case):
    wanted = case.wanted()
    np.testing.assert_allclose(
        case.found(), wanted, rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype]
    )


@pytest.mark.parametrize("name", CASES)
def test_attributes(name):
    assert_close(CASES[name])


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_heads_that_share(heads, kv_heads):
    """More query heads of a KV head than a tile has lanes take several tiles."""
    assert_close(Case(heads=heads, kv_heads=kv_heads, requests=((1, 290), (20, 30))))


@pytest.mark.parametrize(("k_width", "v_width"), WIDTHS)
def test_widths(k_width, v_width):
    assert_close(Case(k_width=k_width, v_width=v_width, requests=((1, 290), (20, 30))))


@pytest.mark.parametrize("kv", [torch.float32, torch.bfloat16, torch.float16, *CODES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_values_and_cache(dtype, kv):
    assert_close(Case(dtype=dtype, kv=kv, requests=((1, 290), (20, 30)), sinks=True))


@pytest.mark.parametrize("kv", CODES)
@pytest.mark.parametrize("name", ["causal", "window over splits", "all at once", "latent"])
def test_codes(name, kv):
    assert_close(replace(CASES[name], kv=kv))


@pytest.mark.parametrize("window", [None, 100])
def test_a_prompt_over_many_blocks_of_keys(window):
    """A prompt's tiles compute the keys that all rows see, and those before and behind them."""
    assert_close(Case(requests=((330, 600), (70, 400)), window=window, heads=2, kv_heads=1, pad=0))


def test_programs_of_a_launch():
    """A launch has one program for each split, but no more than make enough together."""
    assert (
        attention.programs_per_tile(8, 128, 8192) == 128
        and attention.programs_per_tile(2048, 33, 8192) == 4
        and attention.programs_per_tile(10**6, 9, 8192) == 1
    )


def test_no_rows_at_all():
    for requests in ((), ((0, 3),)):
        assert Case(requests=requests, pad=2).found().shape == (0, 4, 24)


def test_states_that_do_not_fit_go_some_requests_at_a_time(monkeypatch):
    case = Case(requests=((1, 300), (1, 40), (3, 3), (1, 530), (1, 257), (1, 1)))
    wanted = case.found()
    for at_once in (1, 2, 3):
        monkeypatch.setattr(attention, "MOST_STATE_BYTES", at_once * 4 * 4 * 3 * 26)
        torch.testing.assert_close(case.found(), wanted, rtol=0, atol=0)


def test_a_faulty_row_is_its_own():
    """NaN in one query row reaches no other row."""
    case = Case(requests=((1, 300), (20, 40)))
    wanted = case.found()
    case.call.q[0], case.call.q[5] = torch.nan, torch.nan
    found = case.found()
    assert found[[0, 5]].isnan().all()
    others = [row for row in range(21) if row not in (0, 5)]
    torch.testing.assert_close(found[others], wanted[others], rtol=0, atol=0)


# -- within the backend, against the reference -----------------------------------------------------


def backend(kv="fp32", *, fixed_tiles=False, **options):
    """Returns a backend. With `fixed_tiles` rows stay together, though batch_invariant would
    compute each as a step of its own.
    """
    return TorchBackend(
        BackendOptions(
            num_threads=1, kv_cache_dtype=kv, dtype="float32", attention_backend="triton", **options
        ),
        DEVICE.type,
        attention=(TritonAttention(DEVICE, fixed_tiles=fixed_tiles),),
    )


KINDS = ("fp32", "bf16", "int8", "fp8")
CHOSEN = [
    "three a head",
    "odd widths",
    "window over splits",
    "softcap",
    "sinks in a window",
    "chunk over splits",
]


def cases_of_native():
    for name in [*HEADS, *MASKS]:
        for kv in KINDS:
            quick = name in CHOSEN and kv == KINDS[CHOSEN.index(name) % len(KINDS)]
            yield pytest.param(name, kv, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "kv"), list(cases_of_native()))
def test_shapes_and_masks(name, kv):
    shape = {**HEADS, **MASKS}[name]
    wanted = Run(shape, ReferenceBackend(BackendOptions(kv_cache_dtype=kv))).whole()
    np.testing.assert_allclose(Run(shape, backend(kv)).whole(pad=2), wanted, rtol=5e-5, atol=5e-5)
    if shape.mask != "full":
        np.testing.assert_allclose(
            Run(shape, backend(kv)).steps(mixed(shape), pad=2), wanted, rtol=5e-5, atol=5e-5
        )


COMPANY = {
    "causal": Shape(contexts=(1, 40, 530)),
    "window": Shape(mask="window", window=260, contexts=(40, 290)),
    "sinks": Shape(6, 1, 16, 16, sinks=True, contexts=(7, 270)),
    "chunk": Shape(mask="chunk", window=260, contexts=(40, 290)),
}


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("causal", "fp32"),
        ("causal", "int8"),
        ("window", "bf16"),
        ("chunk", "bf16"),
        ("sinks", "fp32"),
    ],
)
def test_a_row_has_the_same_bits_in_any_company(name, kv):
    """A row has the same bits whole, in chunks, alone (which the kernels of splits compute), and
    beside requests that join and leave.
    """
    shape = COMPANY[name]
    whole = Run(shape, backend(kv, fixed_tiles=True)).whole()
    for steps in (mixed(shape), chunks(shape, 100)):
        np.testing.assert_array_equal(
            Run(shape, backend(kv, fixed_tiles=True), seed=3).steps(steps, pad=2), whole
        )
    run = Run(shape, backend(kv, fixed_tiles=True), seed=4)
    lasts = [(r, n - 1, n) for r, n in enumerate(shape.contexts)]
    run.step([(r, 0, n) for r, n in enumerate(shape.contexts)])
    ends = np.cumsum(shape.contexts) - 1
    np.testing.assert_array_equal(run.step(lasts), whole[ends])
    np.testing.assert_array_equal(np.concatenate([run.step([span]) for span in lasts]), whole[ends])


def test_what_earlier_requests_left_in_a_block_is_not_seen():
    shape = Shape(contexts=(40, 40))
    wanted = Run(shape, backend()).step([(0, 0, 21)])
    used = Run(shape, backend())
    used.tables[1] = used.tables[0]
    for at in range(40):
        used.first[1] = shape.num_tokens - at
        assert np.isnan(used.step([(1, at, at + 1)])).all()
    np.testing.assert_array_equal(used.step([(0, 0, 21)]), wanted)


def test_keys_out_of_the_window_are_not_read():
    shape = Shape(mask="window", window=37, contexts=(100,))
    run = Run(shape, backend())
    wanted = run.whole()[99]
    run.tables[0] = run.tables[0].copy()
    run.tables[0][:3] = -1
    np.testing.assert_array_equal(run.step([(0, 99, 100)])[0], wanted)
