"""What the native backend packs, byte for byte: tiles as csrc/kernels/table.h draws them, written
by NumPy from a weight's arrays.
"""

import ml_dtypes
import numpy as np
import pytest

from octavo.backends.base import BackendOptions
from octavo.backends.native.backend import NativeBackend, _Weights
from octavo.program.program import Weight
from octavo.quant.blocks import BlockWeight
from octavo.quant.packed import PackedWeight
from tests.backends.native.test_linear import FLOATS, FORMATS, GGUF, weight_of
from tests.support.native_harness import normal, require_native

TILE, GROUP = 16, 32
SHAPES = [(37, 256), (16, 768), (5, 2304)]


def weights_of(arrays, dtype="auto", threads=2):
    """`arrays` by name as the native backend has them, and their names' Weights."""
    require_native()
    device = NativeBackend(BackendOptions(num_threads=threads))._device
    return _Weights(device, lambda weight: arrays[weight.name], dtype), {
        name: Weight(name, array.shape) for name, array in arrays.items()
    }


def native_tiles(weight, dtype="auto", threads=2, **wide):
    weights, named = weights_of({"w": weight}, dtype, threads)
    tiles = weights.tiles(named["w"], **wide)
    weights.pack()
    return tiles.handle.copy()


def tiles(array, unit):
    """`[out, in]` as `[tiles, groups, in / unit of a group, 16 outputs, unit]`, filled up with
    zeros.
    """
    n, k = array.shape
    padded = np.zeros((-(-n // TILE) * TILE, -(-k // GROUP) * GROUP), array.dtype)
    padded[:n, :k] = array
    return padded.reshape(len(padded) // TILE, TILE, -1, GROUP // unit, unit).transpose(
        0, 2, 3, 1, 4
    )


def levels_of(levels, n):
    """`[out, numbers]` as `[tiles, numbers, 16 outputs]`; two levels, and all but fp16, as fp32."""
    one = levels.super_scale is None and levels.values.dtype == np.float16
    numbers = levels.values if one else levels.expand()
    padded = np.zeros((-(-n // TILE) * TILE, numbers.shape[1]), numbers.dtype)
    padded[:n] = numbers
    return padded.reshape(-1, TILE, numbers.shape[1]).swapaxes(1, 2)


def written(packed, *, wide):
    """Bytes of the tiles of codes in groups."""
    codes = packed.unpacked_codes()
    codes = (codes.astype(np.int16) + 128).astype(np.uint8) if codes.dtype == np.int8 else codes
    quads = tiles(codes, 4)
    if packed.bits == 4 and not wide:
        quads = quads[:, :, ::2] | quads[:, :, 1::2] << 4
    parts = [quads.reshape(*quads.shape[:2], -1)]
    for levels in (packed.scales, packed.mins):
        if levels is not None:
            repeated = np.repeat(
                levels_of(levels, packed.shape[0]), max(packed.group // GROUP, 1), axis=1
            )
            parts.append(
                np.ascontiguousarray(repeated).view(np.uint8).reshape(*quads.shape[:2], -1)
            )
    return np.concatenate(parts, axis=-1).tobytes()


@pytest.mark.parametrize("kind", sorted(set(FORMATS) - set(FLOATS) - {"int8"}))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_codes_in_groups(kind, shape, wide):
    weight = weight_of(kind, *shape, seed=1)
    assert isinstance(weight, BlockWeight) == (kind in GGUF)
    assert native_tiles(weight, wide=wide) == written(weight.packed(), wide=wide)


@pytest.mark.parametrize("kind", sorted(GGUF))
def test_blocks_of_chosen_rows_and_inputs(kind):
    """Views of a file, and copies of some of its rows."""
    weight = weight_of(kind, 40, 1024, seed=2)
    for part in (
        weight.rows(slice(3, 31)),
        weight.rows(np.array([7, 0, 39])),
        weight.inputs(256, 768),
    ):
        assert native_tiles(part, threads=1) == written(part.packed(), wide=False)


@pytest.mark.parametrize("shape", [(37, 100), (16, 192)], ids=str)
def test_one_scale_an_output(shape):
    packed = weight_of("int8", *shape)
    n, k = shape
    codes = np.pad(packed.codes, ((0, 0), (0, -k % (2 * GROUP))))
    quads = tiles(codes, 4)
    scales = np.zeros((len(quads) * TILE, 1), np.float32)
    scales[:n] = packed.scales.values
    parts = [
        quads.reshape(len(quads), -1).view(np.uint8),
        scales.view(np.uint8).reshape(len(quads), -1),
    ]
    assert native_tiles(packed) == np.concatenate(parts, axis=-1).tobytes()


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_floats(kind, dtype):
    values = normal(37, 100, seed=4).astype(FLOATS[kind])
    wanted = values.astype(
        {"auto": values.dtype, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    )
    raw = wanted.view({2: np.uint16, 4: np.uint32}[wanted.itemsize])
    assert (
        native_tiles(PackedWeight.plain(values), dtype)
        == tiles(raw, 2 if wanted.dtype.name == "bfloat16" else 1).tobytes()
    )


@pytest.mark.parametrize(
    ("gate", "up"),
    [("a", "b"), ("known", "b"), ("a", "known"), ("a", "wider"), ("a", "shorter"), ("a", "a")],
)
def test_gate_and_up_in_turns(gate, up):
    """Tiles that lie in turns are the same tiles; those of weights that others know already, or
    that are not alike, stay where they are.
    """
    arrays = {
        name: weight_of("int4", 40, 256, seed=seed) for seed, name in enumerate(("a", "b", "known"))
    }
    arrays |= {"wider": weight_of("int8", 40, 256), "shorter": weight_of("int4", 24, 256)}
    weights, named = weights_of(arrays)
    fits = (gate, up) == ("a", "b")
    known = weights.tiles(named["known"])
    pair = weights.gate_and_up(named[gate], named[up])
    assert weights.gate_and_up(named[gate], named[up]) == pair
    weights.pack()
    assert [tiles.handle.is_interleaved for tiles in (*pair, known)] == [fits, fits, False]
    for name, tiles in (gate, pair[0]), (up, pair[1]), ("known", known):
        assert tiles.handle.copy() == native_tiles(arrays[name])
