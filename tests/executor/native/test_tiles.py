"""The tile layout of the native backend, byte for byte as csrc/kernels/weights.h describes it:
the tests build tiles with NumPy from a weight's arrays.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from octavo.executor.native.extension import native_module
from octavo.executor.native.formats import FORMATS as TILE_FORMATS
from octavo.executor.native.weights import NativeWeights, add_weight
from octavo.program.program import Weight
from octavo.quant.blocks import BlockWeight
from octavo.quant.packed import PackedWeight
from tests.support.native_harness import normal, require_native
from tests.support.native_products import FLOAT_CODES, FLOATS, FORMATS, GGUF, weight_of

TILE, GROUP = 16, 32
SHAPES = [(37, 256), (16, 768), (5, 2304)]


def make_device(threads=2):
    require_native()
    native = native_module()
    directory = str(Path(native.__file__).parent)
    return native.Device(threads, directory, native.supported_levels()[-1])


def weights_of(arrays):
    """Returns `arrays` by name as the native backend has them, and their names' Weights."""
    weights = NativeWeights(make_device(), lambda weight: arrays[weight.name], "auto")
    return weights, {name: Weight(name, array.shape) for name, array in arrays.items()}


def native_tiles(weight, dtype="auto", threads=2):
    packer = native_module().Packer(make_device(threads))
    tiles = add_weight(packer, weight, dtype)
    packer.run()
    return tiles.copy()


def tiles(array, unit):
    """Returns `[out, in]` as `[tiles, groups, in / unit of a group, 16 outputs, unit]`, filled up
    with zeros.
    """
    n, k = array.shape
    padded = np.zeros((-(-n // TILE) * TILE, -(-k // GROUP) * GROUP), array.dtype)
    padded[:n, :k] = array
    return padded.reshape(len(padded) // TILE, TILE, -1, GROUP // unit, unit).transpose(
        0, 2, 3, 1, 4
    )


def padded(numbers):
    """Returns `[out, numbers]` as `[tiles, numbers, 16 outputs]`, filled up with zeros."""
    whole = np.zeros((-(-len(numbers) // TILE) * TILE, numbers.shape[1]), numbers.dtype)
    whole[: len(numbers)] = numbers
    return np.ascontiguousarray(whole.reshape(-1, TILE, numbers.shape[1]).swapaxes(1, 2))


def levels_of(levels, n):
    """Returns `[out, numbers]` as `[tiles, numbers, 16 outputs]`; two levels, and all but fp16, as
    fp32.
    """
    one = levels.super_scale is None and levels.values.dtype == np.float16
    numbers = levels.values if one else levels.expand()
    return padded(numbers[:n])


def planes(quads, low, high=0):
    """Returns codes `[tiles, groups, 8 quads, 16 outputs, 4]` in a tile's order, first
    the low bits, then the high ones: `[tiles, groups, bytes]`.
    """
    parts = []
    for first, bits in ((0, low), (low, high)):
        if bits:
            shared = 8 // bits
            some = quads >> first & (1 << bits) - 1
            parts.append(sum(some[:, :, i::shared] << bits * i for i in range(shared)))
    return np.concatenate(
        [part.astype(np.uint8).reshape(*part.shape[:2], -1) for part in parts], axis=-1
    )


def written(packed):
    """Returns the bytes of the tiles of codes in groups with scales of one level."""
    codes = packed.unpacked_codes()
    codes = (codes.astype(np.int16) + 128).astype(np.uint8) if codes.dtype == np.int8 else codes
    quads = tiles(codes, 4)
    is_fp16 = packed.scales.super_scale is None and packed.scales.values.dtype == np.float16
    if packed.bits == 4:
        parts = [planes(quads, 4)]
    elif packed.bits == 5 and is_fp16:
        parts = [planes(quads, 4, 1)]
    else:
        parts = [planes(quads, 8)]
    for levels in (packed.scales, packed.mins):
        if levels is not None:
            repeated = np.repeat(
                levels_of(levels, packed.shape[0]), max(packed.group // GROUP, 1), axis=1
            )
            parts.append(
                np.ascontiguousarray(repeated).view(np.uint8).reshape(*quads.shape[:2], -1)
            )
    return np.concatenate(parts, axis=-1).tobytes()


ONE_LEVEL = sorted(
    kind for kind in set(FORMATS) - {*FLOATS, *FLOAT_CODES, "int8"} if not kind.endswith("_K")
)


@pytest.mark.parametrize("kind", ONE_LEVEL)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_in_groups(kind, shape):
    """Codes are stored in fours of inputs, 4-bit codes two per byte; in groups of 16 they are
    indices into a table.
    """
    weight = weight_of(kind, *shape, seed=1)
    assert isinstance(weight, BlockWeight) == (kind in GGUF)
    assert native_tiles(weight) == written(weight.packed())


CODE_BITS = {"Q2_K": (2, 0), "Q3_K": (2, 1), "Q4_K": (4, 0), "Q5_K": (4, 1), "Q6_K": (4, 2)}
"""Low and high bits of codes with scales of two levels."""


def written_two_levels(kind, packed):
    """Returns the bytes of the tiles of codes with scales of two levels: fp16 factors before each
    eight groups, then each group's codes, scales and mins. Q2_K has both in one byte.
    """
    codes = planes(tiles(packed.unpacked_codes(), 4), *CODE_BITS[kind])
    levels = [(packed.scales, 1)] + ([] if packed.mins is None else [(packed.mins, -1)])
    numbers = [one.values.astype(np.int8) * np.int8(sign) for one, sign in levels]
    if kind == "Q2_K":
        numbers = [numbers[0] | -numbers[1] << 4]
    groups = [codes] + [padded(one).view(np.uint8).reshape(*codes.shape[:2], -1) for one in numbers]
    whole = np.concatenate(groups, axis=-1)
    spans = whole.reshape(len(whole), whole.shape[1] // 8, -1)
    factors = [
        padded(one.super_scale * np.float16(sign)).view(np.uint8).reshape(*spans.shape[:2], -1)
        for one, sign in levels
    ]
    return np.concatenate([*factors, spans], axis=-1).tobytes()


@pytest.mark.parametrize("kind", CODE_BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_of_two_levels(kind, shape):
    weight = weight_of(kind, *shape, seed=1)
    assert native_tiles(weight) == written_two_levels(kind, weight.packed())


@pytest.mark.parametrize("kind", sorted(GGUF))
def test_blocks_of_chosen_rows_and_inputs(kind):
    """Some rows or inputs of a file's blocks are packed as they would be by themselves."""
    weight = weight_of(kind, 40, 1024, seed=2)
    for part in (
        weight.rows(slice(3, 31)),
        weight.rows(np.array([7, 0, 39])),
        weight.inputs(256, 768),
    ):
        packed = part.packed()
        wanted = written_two_levels(kind, packed) if kind in CODE_BITS else written(packed)
        assert native_tiles(part, threads=1) == wanted


@pytest.mark.parametrize("shape", [(37, 100), (16, 192)], ids=str)
def test_one_scale_an_output(shape):
    """Codes with one scale an output lie in pairs of groups, with the scales at the tile's end."""
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


@pytest.mark.parametrize("kind", FLOAT_CODES)
@pytest.mark.parametrize("shape", [(37, 256), (5, 416), (16, 96)], ids=str)
def test_codes_that_stand_for_floats(kind, shape):
    """Scales lie before the codes of at most 128 inputs, fewer where groups are smaller."""
    weight = weight_of(kind, *shape, seed=1)
    span = min((FLOAT_CODES[kind] or 128) // GROUP, 4)
    span = 4 if weight.group >= shape[1] else span
    quads = tiles(weight.unpacked_codes().view(np.uint8), 4)
    if weight.bits == 4:
        quads = quads[:, :, ::2] | quads[:, :, 1::2] << 4
    else:
        quads = quads[..., [0, 2, 1, 3]]
    scales = np.repeat(levels_of(weight.scales, shape[0]), weight.group // GROUP, axis=1)
    written = b""
    for tile, tile_scales in zip(quads, scales, strict=True):
        for first in range(0, len(tile), span):
            written += tile_scales[first].tobytes() + tile[first : first + span].tobytes()
    assert native_tiles(weight) == written


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_floats(kind, dtype):
    """Floats lie in tiles in the precision that was asked for."""
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
    """Tiles that lie in turns are the same tiles; those of weights that were packed before, or
    that are not laid out alike, stay where they are.
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


NAMES = {"int8": "I8", "int4": "Q4_1", "fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""Names of formats where the tests' kinds of weight have others."""

SIZED = [(kind, shape) for kind in (*FLOATS, *GGUF, "int8", "int4") for shape in SHAPES]
SIZED += [(kind, shape) for kind in (*FLOATS, "int8") for shape in ((37, 100), (16, 192), (1, 32))]


@pytest.mark.parametrize(("kind", "shape"), SIZED, ids=str)
def test_the_extension_answers_the_bytes_that_packing_takes(kind, shape):
    """A format's tiles have the bytes that were answered for them before anything was read."""
    packer = native_module().Packer(make_device())
    found = TILE_FORMATS[NAMES.get(kind, kind)]
    taken = add_weight(packer, weight_of(kind, *shape))
    assert found.num_bytes(shape) == taken.num_bytes
    assert found.num_bytes((3, *shape)) == 3 * found.num_bytes(shape)
