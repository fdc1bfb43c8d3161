"""Tiles of attention where a device's shared memory is small. The bytes that kernels take were read
off them as compiled (`compile_kernels`).
"""

import pytest
import torch

from octavo.api.errors import BackendUnavailable
from octavo.executor.torch.triton import attention_tiles, tuning
from octavo.executor.torch.triton.attention import TritonAttention
from octavo.executor.torch.triton.attention_tiles import AttentionTiles
from octavo.executor.torch.triton.fit import (
    LEAST,
    attention_bytes,
    fitted,
    fitted_rows,
    shared_bytes,
)
from octavo.executor.torch.triton.tuning import TunedLaunch, tuned
from octavo.program import ops
from octavo.program.program import Value, Weight
from tests.executor.torch.triton.attention_case import Case

CPU = torch.device("cpu")
GPUS = {"H100": 227 << 10, "A100": 163 << 10, "L4": 99 << 10, "T4": 64 << 10}

COMPILED = [
    (64, 64, (64, 64), 4, 64),
    (16, 64, (64, 64), 4, 40),
    (64, 64, (80, 128), 4, 88),
    (16, 64, (80, 128), 4, 61),
    (64, 64, (128, 128), 4, 112),
    (16, 64, (128, 128), 4, 76),
    (64, 64, (64, 64), 2, 24),
    (64, 64, (256, 256), 2, 72),
    (64, 64, (576, 512), 2, 144),
    (16, 64, (576, 512), 2, 84),
]
"""BLOCK_M, BLOCK_N, columns of keys and values, bytes of a number, and KiB of shared memory as
compiled."""

WIDTHS = [(64, 64), (128, 128), (192, 128), (256, 256), (576, 512)]


@pytest.mark.parametrize(("m", "n", "widths", "itemsize", "kib"), COMPILED)
def test_no_tile_takes_more_than_is_reckoned(m, n, widths, itemsize, kib):
    reckoned = attention_bytes(m, n, widths, itemsize) >> 10
    assert kib <= reckoned <= kib + 1 if itemsize == 4 else reckoned >= kib


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kernel", ["decode_attention", "shared_attention", "prefill_attention"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_for_any_device_fit_on_every_gpu_or_are_refused_by_name(gpu, kernel, itemsize):
    most, launch = GPUS[gpu], tuned(kernel, "*")
    for widths in WIDTHS:
        base = fitted_rows(launch, widths, most) if kernel == "shared_attention" else launch
        try:
            found = fitted(base, widths, itemsize, most, keep_rows=kernel != "prefill_attention")
        except BackendUnavailable as error:
            assert attention_bytes(LEAST, LEAST, widths, itemsize) > most or base["BLOCK_M"] > LEAST
            assert (
                f"keys {widths[0]} wide (values {widths[1]}) take" in error.message
                and f"the device has {most}" in error.message
            )
            assert widths[0] == 576 and (itemsize == 4 or gpu == "T4"), (
                "only latents are too wide for a GPU"
            )
        else:
            assert attention_bytes(found["BLOCK_M"], found["BLOCK_N"], widths, itemsize) <= most
            assert (
                min(found["BLOCK_M"], found["BLOCK_N"]) >= LEAST
                and found["num_warps"] == launch["num_warps"]
            )


def test_what_fits_stays_as_it_is():
    launch = tuned("prefill_attention", "*")
    assert fitted(launch, (128, 128), 2, GPUS["L4"]) == launch
    assert fitted(launch, (256, 256), 2, GPUS["H100"]) == launch


@pytest.mark.parametrize("fixed_tiles", [False, True])
def test_small_tiles_compute_the_same(fixed_tiles, monkeypatch):
    """Small tiles compute the same for requests of one row and of several, as on a GPU with little
    shared memory.
    """
    rows = tuple(TunedLaunch(**{**row, "device": "*"}) for row in ROWS)
    monkeypatch.setattr(tuning, "table", lambda: rows)
    tuning.best_row.cache_clear()
    case = Case(
        heads=8, kv_heads=2, k_width=192, v_width=128, requests=((1, 300), (40, 290), (1, 17))
    )
    small = TritonAttention(CPU, fixed_tiles=fixed_tiles, shared_bytes=GPUS["T4"])
    tiles = AttentionTiles(CPU, fixed_tiles=fixed_tiles, shared_bytes=GPUS["T4"])
    decode, shared = tiles.decode(case.call), tiles.shared(case.call)
    rows_per_run = tiles.rows_per_run(192, 128, 4)
    found = case.live(small.attend(case.call))
    tuning.best_row.cache_clear()
    assert (
        decode["BLOCK_M"] == 16 and decode["BLOCK_N"] < 64 and rows_per_run * 4 == shared["BLOCK_M"]
    )
    torch.testing.assert_close(found, case.wanted(), rtol=2e-5, atol=2e-5)


ROWS = [
    {"kernel": "decode_attention", "shape": {}, "launch": {"BLOCK_M": 16, "BLOCK_N": 64}},
    {"kernel": "shared_attention", "shape": {}, "launch": {"BLOCK_M": 64, "BLOCK_N": 64}},
    {"kernel": "prefill_attention", "shape": {}, "launch": {"BLOCK_M": 64, "BLOCK_N": 64}},
    {
        "kernel": "merge_attention",
        "shape": {},
        "launch": {"HEADS_A_TILE": 16, "SPLITS": 1, "STAGES": 1},
    },
]


def test_what_was_measured_on_a_device_is_not_touched(monkeypatch):
    monkeypatch.setattr(attention_tiles, "is_measured", lambda kernel, device, **shape: True)
    tiles = AttentionTiles(CPU, fixed_tiles=False, shared_bytes=1)
    assert tiles.prefill(Case().call) == tuned("prefill_attention", "interpreter")


LATENT = ops.MlaAttention(
    Value("q", "tokens", 2048),
    Value("r", "tokens", 1024),
    Value("o", "tokens", 2048),
    Weight("w", (4096, 512)),
    "latent",
    0,
    num_heads=16,
    nope_width=128,
    rope_width=64,
    latent_width=512,
    v_width=128,
    scale=1.0,
)


@pytest.mark.parametrize(
    ("gpu", "kv", "fits"),
    [("L4", torch.float32, False), ("L4", torch.bfloat16, True), ("A100", torch.float32, True)],
)
def test_what_fits_nowhere_is_refused_before_a_step(gpu, kv, fits):
    reason = TritonAttention(torch.device("cpu"), shared_bytes=GPUS[gpu]).unsupported_reason(
        LATENT, kv
    )
    wanted = (
        "Triton's smallest tiles of keys 576 wide (values 512) take 108544 bytes of shared memory,"
        " the device has 101376"
    )
    assert reason == (None if fits else wanted)


def test_the_interpreter_has_any_number():
    assert shared_bytes(torch.device("cpu")) is None
