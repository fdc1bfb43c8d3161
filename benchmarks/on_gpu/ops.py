"""Every op on the device against the reference backend in float64: random Programs, and tiny models
of every family.

Bounds are parts of the largest number: 1e-3 for random Programs, whose numbers grow on the way;
3e-5 for families in fp32; in bf16, where every Value is rounded, 6% in the root of the mean square,
because a token that is routed to other experts has logits far off.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.on_gpu.report import checked
from benchmarks.on_gpu.settings import Emit, Settings, attempt
from octavo.executor.base import BackendOptions
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.torch.backend import TorchBackend

Error = Callable[[np.ndarray, np.ndarray], float]


def section(settings: Settings, emit: Emit) -> None:
    attempt(emit, "random Programs", partial(_random_programs, settings, emit))
    if importlib.util.find_spec("transformers") is None:
        emit({"note": "transformers is not installed: families are not checked"})
        return
    from tests.support.tiny_models import FAMILIES

    for family in ["llama"] if settings.tiny else [family for family in FAMILIES if family != "t5"]:
        attempt(emit, family, partial(_family, family, settings, emit))


def backend_on(settings: Settings, **options: Any) -> TorchBackend:
    """Returns a backend that computes steps op by op, whatever their size."""
    return TorchBackend(
        BackendOptions(
            max_tokens=512, max_requests=8, max_context=512, enforce_eager=True, **options
        ),
        settings.device,
    )


def _random_programs(settings: Settings, emit: Emit) -> None:
    from hypothesis import HealthCheck, given
    from hypothesis import settings as examples
    from hypothesis import strategies as st

    from tests.executor.native.test_programs import batch_of, logits_of
    from tests.support.random_programs import NUM_ROWS, random_programs

    worst = 0.0

    quiet = {
        "deadline": None,
        "derandomize": True,
        "database": None,
        "suppress_health_check": list(HealthCheck),
    }

    @examples(max_examples=3 if settings.tiny else 40, **quiet)
    @given(random_programs(), st.integers(1, NUM_ROWS), st.sampled_from([1, 5, 128, 129, 300]))
    def compare(made: Any, rows: int, samples: int) -> None:
        nonlocal worst
        batch = batch_of(rows, samples)
        wanted = logits_of(ReferenceBackend(), made, batch)
        found = logits_of(backend_on(settings, dtype="float32"), made, batch)
        error = float(abs(found - wanted).max() / max(1.0, abs(wanted).max()))
        worst = max(worst, error)
        assert error < 1e-3, error

    compare()
    emit(
        checked(
            "random Programs, fp32",
            ok=worst < 1e-3,
            detail=f"{worst:.1e} of the largest logit, expected 1e-3",
        )
    )


def _family(family: str, settings: Settings, emit: Emit) -> None:
    """Compares a family's logits, computed in chunks of 37 tokens beside padded rows."""
    from octavo.checkpoint.open import open_checkpoint
    from octavo.checkpoint.weights import WeightReader
    from tests.support.paged_runner import PagedRunner
    from tests.support.tiny_models import tiny_model

    tiny = tiny_model(family)
    ids = np.random.default_rng(1).integers(
        0, tiny.config["vocab_size"], 30 if settings.tiny else 270
    )
    for dtype, bound, error in (
        ("float32", 3e-5, _largest),
        ("bfloat16", 0.06, _root_of_mean_square),
    ):
        load = WeightReader(open_checkpoint(tiny.path), dtype).load
        wanted = PagedRunner(tiny.path, load=load).logits(ids)
        found = PagedRunner(
            tiny.path, backend_on(settings, dtype=dtype), load=load, padding=2
        ).logits(ids, 37)
        share = error(found, wanted) / abs(wanted).max()
        emit(
            checked(
                f"{family}, {dtype}",
                ok=share < bound,
                detail=f"{share:.1e} of the largest logit, expected {bound:g}",
            )
        )


def _largest(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(abs(found - wanted).max())


def _root_of_mean_square(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - wanted) ** 2)))
