"""Row ops of the native backend against the reference, at every instruction-set level; a row's bits
are the same in any company.

Tolerances are stated with each op: a few units in the last place of fp32, wider where an
exponential is involved.
"""

import subprocess
import sys
from functools import cache

import numpy as np
import pytest

from octavo.api.errors import BackendUnavailable
from octavo.config.derive import derive
from octavo.config.engine_config import EngineConfig
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.native.extension import supported_levels
from octavo.program import ops
from octavo.program.family_ops import Xielu
from octavo.program.program import Value, Weight
from octavo.wiring.backend import build_backend
from tests.support.native_harness import NUM_ROWS, Case, check_rows, normal, plain, require_native

WIDTHS = (1, 7, 16, 37, 100, 576)


def like(value, name="y", width=None):
    return Value(name, value.axis, value.width if width is None else width)


# -- norms -----------------------------------------------------------------------------------------


@cache
def rms_norm(width, group, offset):
    def make(v):
        return [
            ops.RmsNorm(v["x"], like(v["x"]), Weight("w", (group or width,)), 1e-5, offset, group)
        ]

    return Case(
        {"x": normal(NUM_ROWS, width, scale=3)},
        make,
        plain({"w": normal(group or width, seed=1)}),
        rtol=2e-6,
        atol=2e-6,
    )


@pytest.mark.parametrize(
    ("width", "group", "offset"),
    [*((w, 0, 0.0) for w in WIDTHS), (96, 24, 1.0), (128, 64, 0.0), (21, 7, 1.0)],
)
def test_rms_norm(level, width, group, offset):
    """`group` is a head norm's width, `offset` Gemma's 1 + weight."""
    check_rows(rms_norm(width, group, offset), level)


@cache
def layer_norm(width, bias):
    def make(v):
        return [
            ops.LayerNorm(
                v["x"],
                like(v["x"]),
                Weight("w", (width,)),
                Weight("b", (width,)) if bias else None,
                1e-5,
            )
        ]

    weights = plain({"w": normal(width, seed=1), "b": normal(width, seed=2)})
    return Case({"x": normal(NUM_ROWS, width, scale=3) + 2}, make, weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [7, 16, 37, 100, 576])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(level, width, bias):
    check_rows(layer_norm(width, bias), level)


def test_norms_of_rows_of_zeros(level):
    case = Case(
        {"x": np.zeros((NUM_ROWS, 20), np.float32)},
        rms_norm(20, 0, 0.0).make,
        rms_norm(20, 0, 0.0).weights,
    )
    check_rows(case, level)
    case = Case(
        {"x": np.zeros((NUM_ROWS, 37), np.float32)},
        layer_norm(37, True).make,
        layer_norm(37, True).weights,
    )
    check_rows(case, level)


# -- elementwise -----------------------------------------------------------------------------------

ELEMENTWISE = {
    "add": (ops.Add, 0),
    "mul": (ops.Mul, 0),
    "scale": (lambda a, b, y: ops.Scale(a, y, 0.37), 1e-7),
    "softcap": (lambda a, b, y: ops.SoftCap(a, y, 1.5), 1e-6),
    "clip": (lambda a, b, y: ops.Clip(a, y, 0.7), 1e-7),
    "act_mul silu": (lambda a, b, y: ops.ActMul(a, b, y, "silu"), 2e-6),
    "act_mul gelu_tanh": (lambda a, b, y: ops.ActMul(a, b, y, "gelu_tanh"), 2e-6),
    "act_mul as gpt_oss": (lambda a, b, y: ops.ActMul(a, b, y, "silu", 1.4, 1.702, 1.0), 2e-6),
    **{
        kind: (lambda a, b, y, kind=kind: ops.Act(a, y, kind), 2e-6)
        for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "softplus")
    },
}
"""Each op of inputs a and b, and its tolerance: 0 where one fp32 operation has one right answer
(equal to the rounded reference).
"""


@cache
def elementwise(kind, width):
    build, tolerance = ELEMENTWISE[kind]
    a, b = normal(NUM_ROWS, width, scale=3), normal(NUM_ROWS, width, seed=1)
    a[0], a[1], a[2] = 0, 60, -60  # where an exponential leaves fp32's range, or nearly
    return Case(
        {"a": a, "b": b},
        lambda v: [build(v["a"], v["b"], like(v["a"]))],
        rtol=tolerance or 6e-8,
        atol=tolerance,
    )


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("width", [1, 16, 37, 100])
def test_elementwise(level, kind, width):
    check_rows(elementwise(kind, width), level)


@cache
def trained_activation(width):
    x = normal(NUM_ROWS, width, scale=3)
    x[0], x[1], x[2], x[3] = 0, 60, -90, 1e-3
    weights = {"alpha_p": 0.4, "alpha_n": -0.3, "beta": 0.5, "eps": -1e-6}
    return Case(
        {"x": x},
        lambda v: [Xielu(v["x"], like(v["x"]), *(Weight(name, (1,)) for name in weights))],
        plain({name: np.array([each], np.float32) for name, each in weights.items()}),
        rtol=3e-6,
        atol=2e-7,
    )


@pytest.mark.parametrize("width", [1, 37])
def test_xielu(level, width):
    check_rows(trained_activation(width), level)


@cache
def gelu_tails():
    sizes = np.geomspace(1e-6, 5.5, NUM_ROWS * 32, dtype=np.float32).reshape(NUM_ROWS, 32)
    sizes[:, 1::2] *= -1
    return Case({"a": sizes}, lambda v: [ops.Act(v["a"], like(v["a"]), "gelu")], rtol=4e-6, atol=0)


def test_gelu_keeps_the_digits_of_its_tails(level):
    """Holds down to -5.5, where the result is a fifty-millionth of the input."""
    check_rows(gelu_tails(), level)


@cache
def spread_product(width):
    inputs = {"a": normal(NUM_ROWS, width), "b": normal(NUM_ROWS, 1, seed=1)}
    return Case(inputs, lambda v: [ops.Mul(v["a"], v["b"], like(v["a"]))], atol=0)


@pytest.mark.parametrize("width", [1, 37])
def test_mul_by_one_number_a_row(level, width):
    check_rows(spread_product(width), level)


# -- positions -------------------------------------------------------------------------------------


@cache
def rope(heads, width, start, rotary, style, mscale):
    inv_freq = tuple(10000.0 ** -(np.arange(rotary // 2) / max(rotary // 2, 1)))

    def make(v):
        return [
            ops.Rope(
                v["x"],
                like(v["x"]),
                heads,
                width,
                rotary,
                start,
                ops.RopeTable(inv_freq, mscale),
                style,
            )
        ]

    positions = np.random.default_rng(5).permutation(4096)[:NUM_ROWS].astype(np.int32)
    return Case(
        {"x": normal(NUM_ROWS, heads * width)}, make, positions=positions, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("heads", "width", "start", "rotary"),
    [(1, 2, 0, 2), (3, 8, 0, 8), (2, 64, 0, 64), (2, 24, 0, 10), (3, 20, 8, 12)],
)
def test_rope(level, style, heads, width, start, rotary):
    """Whole heads, their beginnings, and a part behind columns that stay as they are."""
    check_rows(rope(heads, width, start, rotary, style, 1.0), level)


def test_rope_with_mscale(level):
    check_rows(rope(2, 16, 0, 16, "half", 1.2), level)


@cache
def position_embedding(offset):
    def make(v):
        y = Value("y", "tokens", 20)
        return [ops.Embedding(y, Weight("wpe", (64, 20)), by_position=True, offset=offset)]

    positions = (np.arange(NUM_ROWS, dtype=np.int32) * 7) % (64 - offset)
    return Case(
        {"x": normal(NUM_ROWS, 1)},
        make,
        plain({"wpe": normal(64, 20, seed=3)}),
        positions,
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("offset", [0, 2])
def test_position_embedding(level, offset):
    """Bitwise; padded rows have positions below 0."""
    check_rows(position_embedding(offset), level)


# -- chains ----------------------------------------------------------------------------------------


@cache
def chain():
    """Row ops that overwrite one another's buffers, and one Value read late."""

    def make(v):
        names = iter("abcdefgh")
        made = []

        def then(build, x):
            y = like(x, next(names))
            made.append(build(x, y))
            return y

        first = then(lambda x, y: ops.Scale(x, y, 2.0), v["x"])
        second = then(lambda x, y: ops.Act(x, y, "relu"), first)
        third = then(lambda x, y: ops.RmsNorm(x, y, Weight("w", (40,)), 1e-6), second)
        capped = then(lambda x, y: ops.SoftCap(x, y, 3.0), third)
        total = then(lambda x, y: ops.Add(x, first, y), capped)
        then(lambda x, y: ops.Mul(x, v["x"], y), total)
        return made

    return Case(
        {"x": normal(NUM_ROWS, 40)}, make, plain({"w": normal(40, seed=4)}), rtol=1e-5, atol=1e-5
    )


def test_a_chain_of_row_ops(level):
    check_rows(chain(), level)


# -- what it refuses -------------------------------------------------------------------------------


def test_an_unknown_level_names_those_there_are():
    require_native()
    with pytest.raises(
        BackendUnavailable, match="cpu_level 'sse9': this machine supports portable"
    ):
        NativeBackend(BackendOptions(), level="sse9")


@pytest.mark.parametrize("level", ["auto", "portable"])
def test_an_option_names_the_level(level):
    require_native()
    config = EngineConfig.from_options(cpu_level=level, max_model_len=64)
    backend = build_backend(derive(config, model_context_tokens=64, num_threads=1))
    assert backend.level == (supported_levels()[-1] if level == "auto" else level)


def test_a_step_larger_than_prepared_is_refused():
    require_native()
    case = chain()
    with pytest.raises(ValueError, match="a step of 311 tokens, prepared for 308"):
        case.run(case.native(None), 300, pad=11)


@pytest.mark.parametrize("name", ["token_ids", "slots", "block_tables"])
def test_a_steps_arrays_are_never_converted(name):
    """An array of another type is refused by name: a converted copy would not outlive the call."""
    require_native()
    case = chain()
    runnable, step = case.native(None), case.batch(3, pad=0)
    setattr(step, name, getattr(step, name).astype(np.int64))
    with pytest.raises(TypeError, match=f"{name}: not a C-contiguous array of the type"):
        runnable.run(step, case.memory(runnable))


def test_a_steps_arrays_have_all_their_axes():
    """A one-dimensional block table names itself, where its width would be read out of bounds."""
    require_native()
    case = chain()
    runnable, step = case.native(None), case.batch(3, pad=0)
    step.block_tables = step.block_tables.reshape(-1)
    with pytest.raises(TypeError, match="block_tables: not a C-contiguous array"):
        runnable.run(step, case.memory(runnable))


LENGTHS = ["key_indices", "positions", "context_lens", "slots", "block_tables"]


@pytest.mark.parametrize("name", LENGTHS)
def test_a_steps_arrays_are_as_long_as_its_rows(name):
    """An array that is too short is refused by name; its end would be read out of bounds."""
    require_native()
    case = chain()
    runnable, step = case.native(None), case.batch(3, pad=0)
    array = getattr(step, name)
    cut = array[:, :-1] if array.ndim > 1 else array[:-1]
    setattr(step, name, np.ascontiguousarray(cut))
    with pytest.raises(ValueError, match=f"^{name}: "):
        runnable.run(step, case.memory(runnable))


@pytest.mark.parametrize("starts", [[], [1, 3], [0, 4], [0, 3, 2]])
def test_requests_own_rows_of_the_step(starts):
    require_native()
    case = chain()
    runnable, step = case.native(None), case.batch(3, pad=0)
    step.query_starts = np.array(starts, np.int32)
    with pytest.raises(ValueError, match=r"^query_starts: "):
        runnable.run(step, case.memory(runnable))


MANY_THREADS = """
import resource
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.native.extension import supported_levels
from octavo.config.derive import derive
from octavo.config.engine_config import EngineConfig
from octavo.api.errors import BackendUnavailable

taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (256 << 20),) * 2)
try:
    NativeBackend(BackendOptions(num_threads=5000))
except BackendUnavailable as error:
    print(error)
NativeBackend(BackendOptions(num_threads=2))
"""


def test_more_threads_than_the_system_gives():
    """Threads that were made before the system refused one have ended."""
    ended = subprocess.run(
        [sys.executable, "-c", MANY_THREADS], capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("the native backend cannot start 5000 threads: ")
    assert ended.stdout.endswith("hint: use fewer --threads\n") and ended.stderr == ""
