"""Convolutions and recurrences on the native backend: a request's logits are bitwise the same in
any company, chunks, threads and blocks, at every level of instructions.

That they are right is for `tests/models/test_families.py` to show.
"""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.native.extension import supported_levels
from octavo.executor.torch.backend import TorchBackend
from octavo.program import ops
from octavo.program.mixers import SelectiveScan
from octavo.program.program import Value, Weight
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import tiny_model

CASES = {
    "lfm2": ("lfm2", {}),
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {}),
    "wide state": ("mamba2", {"state_size": 64}),
    "narrow heads": ("mamba2", {"head_dim": 12, "num_heads": 8}),
    "wide heads": ("mamba2", {"head_dim": 24, "num_heads": 4}),
    "hybrid": ("falcon_h1", {}),
}
LENGTH = 90


def runner(case, level, *, threads=1, **options):
    family, overrides = CASES[case]
    backend = NativeBackend(BackendOptions(num_threads=threads), level=level)
    return PagedRunner(tiny_model(family, **overrides).path, backend, **options)


def tokens(length=LENGTH, seed=4):
    return np.random.default_rng(seed).integers(0, 280, length)


@cache
def whole(case, level):
    return runner(case, level).logits(tokens())


EACH_LEVEL = [
    (case, level)
    for case in CASES
    for level in supported_levels()
    if level == supported_levels()[-1] or case in ("lfm2", "mamba", "mamba2")
]


@pytest.mark.parametrize(("case", "level"), EACH_LEVEL)
def test_chunks_are_the_whole(case, level):
    for chunk in (1, 17):
        found = runner(case, level, threads=2, seed=chunk, padding=chunk % 3).logits(
            tokens(), chunk
        )
        np.testing.assert_array_equal(found, whole(case, level))


@pytest.mark.parametrize(("case", "level"), EACH_LEVEL)
def test_a_batch_is_its_requests_alone(case, level):
    run = runner(case, level, threads=3, seed=9, padding=2)
    a, b = run.add(tokens()), run.add(tokens(40, seed=5))
    steps = [[(a, 0, 50), (b, 0, 39)], [(b, 39, 40), (a, 50, 51)], [(a, 51, LENGTH)]]
    found = {id(a): [], id(b): []}
    for spans in steps:
        rows = iter(run.step(spans)["logits"])
        for request, first, end in spans:
            found[id(request)] += [next(rows) for _ in range(first, end)]
    np.testing.assert_array_equal(np.stack(found[id(a)]), whole(case, level))
    alone = runner(case, level).logits(tokens(40, seed=5))
    np.testing.assert_array_equal(np.stack(found[id(b)]), alone)


@pytest.mark.parametrize("case", ["wide state", "narrow heads", "wide heads"])
def test_sizes_of_any_kind_are_as_on_the_reference(case):
    family, overrides = CASES[case]
    wanted = PagedRunner(tiny_model(family, **overrides).path).logits(tokens())
    found = whole(case, supported_levels()[-1])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * abs(wanted).max())


def with_steps_by_state(program, spread):
    """Gives each state number of a delta rule its own step size: dt times a number of `spread`."""
    made = []
    for op in program.ops:
        if isinstance(op, SelectiveScan) and op.beta is not None:
            count = op.num_heads * op.state_size
            names = (f"{op.out.name}.{kind}" for kind in ("factors", "steps"))
            factors, steps = (Value(name, "tokens", count) for name in names)
            table = Weight("factors", (1, count), fill=tuple(np.linspace(*spread, count).tolist()))
            made.append(ops.Embedding(factors, table, by_position=True, others_first=True))
            made.append(ops.Mul(factors, op.dt, steps))
            op = replace(op, dt=steps, dt_bias=Weight("bias", (count,), fill=0.25))
        made.append(op)
    return replace(program, ops=tuple(made))


def test_step_sizes_by_state_are_as_on_the_reference():
    path = tiny_model("qwen3_next").path

    def logits(backend=None, spread=(-2.0, 2.0), chunk=LENGTH):
        rewrite = partial(with_steps_by_state, spread=spread)
        return PagedRunner(path, backend, rewrite=rewrite).logits(tokens(), chunk)

    wanted, alike = logits(), logits(spread=(1.0, 1.0))
    assert abs(wanted - alike).max() > 1e-3 * abs(wanted).max()
    for level in supported_levels():
        native = partial(NativeBackend, level=level)
        found = logits(native(BackendOptions()))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * abs(wanted).max())
        chunked = logits(native(BackendOptions(num_threads=2)), chunk=17)
        np.testing.assert_array_equal(chunked, found)
    on_torch = logits(TorchBackend(BackendOptions(num_threads=1)))
    np.testing.assert_allclose(on_torch, wanted, rtol=0, atol=3e-5 * abs(wanted).max())


def test_a_block_outside_the_memory_is_refused():
    run = runner("lfm2", supported_levels()[-1])
    request = run.add(tokens())
    run.step([(request, 0, 16)])
    request.blocks[1, 0] = 10_000
    with pytest.raises(ValueError, match="block 10000 is outside the KV memory"):
        run.step([(request, 16, 17)])
