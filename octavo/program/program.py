"""A model as data: Values with row axes, KV cache groups, weights, and a flat list of ops.

`models/` builds Programs, `passes/` rewrite them, `executor/` runs them. `ops.py` lists the ops.
The closest relatives are ggml's graph and TVM's Relax.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, Self, get_args

Axis = Literal["tokens", "samples", "requests", "expert_rows"]
"""Row axis of a Value; the number of rows varies per step.

`tokens` may be a decoder's text, an encoder's input or image patches."""

GroupKind = Literal["full", "window", "latent", "conv", "cross", "state"]

KVCacheKind = Literal["growing", "window", "fixed", "state", "step"]
"""Lifetime of a group's blocks: `growing`: until the request ends; `window`: until no later token
sees them; `fixed`: until the request ends, constant in number; `state`: until the request ends, one
state of fixed size; `step`: until the end of the step that writes the blocks.
"""

LIVES: dict[GroupKind, KVCacheKind] = {
    "full": "growing",
    "window": "window",
    "latent": "growing",
    "conv": "window",
    "cross": "fixed",
    "state": "state",
}

PLAIN_TYPES = {"int", "float", "str", "bool", "None", "tuple", "Activation", "MaskKind"}

MADE = ("out", "outs")
"""Names of the fields that hold an op's outputs."""


@dataclass(frozen=True, slots=True)
class Value:
    """An array `[rows of axis, width]` that one op computes and others read.

    Names are unique in a Program.
    """

    name: str
    axis: Axis
    width: int
    dtype: Literal["float", "int"] = "float"


Span = tuple[int, int]
"""Half-open range (first, end)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a weight that one rank stores."""

    shape: tuple[int, ...]
    """Shape of the complete weight."""
    rows: Span | None = None
    """Rows of the output axis; None: all."""
    inputs: Span | None = None
    """Inputs, on the last axis; None: all."""
    experts: Span | None = None
    """Experts, on the first axis; None: all."""


@dataclass(frozen=True, slots=True)
class Sinusoids:
    """Sinusoidal position table: row r is sin(r * f_i) for each frequency, then cos(r * f_i), with
    f_i = 10000^(-i / denominator) (Vaswani et al. 2017, section 3.5).
    """

    denominator: float
    in_single: bool = False
    """Whether frequencies, angles and functions are computed in fp32, instead of rounding once at
    the end."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Table of scaling factors that grow with position p: 1 + slope * log(1 + floor((p + shift) /
    floor)).

    Nakanishi 2025, as Llama 4 and Ministral 3 scale queries.
    """

    floor: int
    slope: float
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """Matrix that selects inputs: row r is 1 at input columns[r], and 0 elsewhere; -1: all 0."""

    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PowerGrowth:
    """Table of scaling factors that grow with position p: (1 + (p + shift) / start)^exponent, as
    Beam scales queries.
    """

    start: int
    exponent: float
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Impulse:
    """Table of position biases that is 0 in one row and `off` in the others."""

    row: int
    off: float


@dataclass(frozen=True, slots=True)
class Harmonics:
    """Matrix that turns a function's values at 0 to period - 1 into amplitudes a and b: f(d) = sum
    over m of a_m cos(w_m d) - b_m sin(w_m d), with w_m = 2 pi m / period.

    The columns are the values; the rows are the amplitudes a of `num_pairs` frequencies from 0 on,
    then b, once per head. Amplitudes beyond period / 2 are 0.
    """

    num_pairs: int


TAPS = 3
"""Taps of a convolution over time."""

StoredAs = Literal["", "row", "heads", "planes", "tap", "run", "strided"]
"""Checkpoint layout of a weight with a different shape: `row`: `[1, n]`; `planes`: rows in planes,
`[kernel[0], n, in]`; `tap`: one tap of a convolution `[out, in, TAPS]`; `run`: such a convolution
with a bias, applied to one of TAPS runs of rows and a 1, `[out, TAPS * (TAPS * in + 1)]`;
`strided`: a convolution `[out, in, TAPS, TAPS]` over time and bands, which skips every other band,
as a matrix from TAPS rows of bands of channels to a row of bands of channels; `kernel` is (bands,
in)."""


Fill = (
    float | tuple[float, ...] | Sinusoids | Growth | PowerGrowth | Selection | Impulse | Harmonics
)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, named as in the family's safetensors checkpoint, and how it is built from stored
    tensors.

    `shape` is what the op needs: `[out, in]` for a linear, `[E, out, in]` for experts, `[n]` for
    norms and biases, `[E, out]` for experts' biases (`rows_last`). `sources` are checkpoint tensors
    (several are stacked on a new first axis); empty: `name` alone. `transposed`: the checkpoint
    stores the last two axes swapped (GPT-2's Conv1D, gpt_oss's experts). If `source_rows` is set,
    the checkpoint's tensor has that many rows on its output axis (after transposing) and row r of
    this weight is its row row_start + (r // row_run) * row_step + r % row_run. `cut` is set on a
    rank's part of a weight; `shape` is then the part's. If `fill` is set, the checkpoint has no
    tensor: `fill` is one number for all values, the numbers of the last axis, or a rule that
    computes them (a norm without weight, a selection of inputs, sinusoids).
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()
    transposed: bool = False
    source_rows: int = 0
    row_start: int = 0
    row_step: int = 1
    row_run: int = 1
    rows_last: bool = False
    cut: Cut | None = None
    fill: Fill | None = None
    kernel: tuple[int, ...] = ()
    """Shape of the input axis in the checkpoint's tensor, such as channels, rows and columns of a
    patch, or one head's part of a vector; (): one axis."""
    stored_as: StoredAs = ""
    tap: int = 0
    """Index of the tap or run, if `stored_as` is one of these."""

    @property
    def row_axis(self) -> int:
        """Output axis of `shape`."""
        return -1 if self.rows_last or len(self.shape) == 1 else -2

    @property
    def row_indices(self) -> tuple[int, ...] | None:
        """Rows of the checkpoint's tensor that form this weight, in order; None: all."""
        if not self.source_rows and (self.cut is None or self.cut.rows is None):
            return None
        first = 0 if self.cut is None or self.cut.rows is None else self.cut.rows[0]
        rows = range(first, first + self.shape[self.row_axis])
        return tuple(
            self.row_start + r // self.row_run * self.row_step + r % self.row_run for r in rows
        )

    @property
    def tensor_rows(self) -> int:
        """Rows of the checkpoint's tensor on its output axis."""
        return self.source_rows or self.whole.shape[self.row_axis]

    @property
    def whole(self) -> Weight:
        """The complete weight, if this is a rank's part."""
        return self if self.cut is None else replace(self, shape=self.cut.shape, cut=None)

    def part(
        self,
        *,
        rows: Span | None = None,
        inputs: Span | None = None,
        experts: Span | None = None,
    ) -> Weight:
        """Returns the part with these rows, inputs and experts; the weight itself if that is
        everything.
        """
        shape = list(self.shape)
        if inputs is not None:
            shape[-1] = inputs[1] - inputs[0]
        if rows is not None:
            shape[self.row_axis] = rows[1] - rows[0]
        if experts is not None:
            shape[0] = experts[1] - experts[0]
        if tuple(shape) == self.shape:
            return self
        cut = self.cut or Cut(self.shape)
        cut = Cut(cut.shape, rows or cut.rows, inputs or cut.inputs, experts=experts or cut.experts)
        return replace(self, shape=tuple(shape), cut=cut)

    @property
    def stored_parts(self) -> tuple[Weight, ...]:
        """The checkpoint tensors as weights with their stored shapes; the weight itself if it is
        stored in its own shape.
        """
        if not self.stored_as:
            return (self,)
        first = self.tensor_names[0]
        if self.stored_as in ("row", "planes"):
            count = self.kernel[0] if self.kernel else 1
            return (Weight(first, (count, self.shape[0] // count, *self.shape[1:])),)
        if self.stored_as == "heads":
            if not self.sources:
                return (Weight(first, (self.shape[0] // self.kernel[0], *self.kernel)),)
            return tuple(Weight(name, self.kernel) for name in self.sources)
        outputs, inputs = self.shape
        if self.stored_as in ("tap", "strided"):
            shape: tuple[int, ...] = (outputs, inputs, TAPS)
            if self.stored_as == "strided":
                bands, channels = self.kernel
                shape = (outputs // -(-bands // 2), channels, TAPS, TAPS)
            return (Weight(first, shape),)
        num_inputs = (inputs // TAPS - 1) // TAPS
        return (
            Weight(first, (outputs, num_inputs, TAPS)),
            Weight(self.tensor_names[1], (outputs,)),
        )

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Checkpoint tensors of this weight; () if it is filled."""
        if self.fill is not None:
            return ()
        names = self.sources or (self.name,)
        if self.cut is None or self.cut.experts is None or len(names) == 1:
            return names
        return names[slice(*self.cut.experts)]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with the same kind of KV under one set of block tables.

    Per layer and token there are `num_kv_heads * k_width` values of K and `num_kv_heads * v_width`
    of V (`latent`: one head, `k_width` = latent + rotary part, `v_width` = 0). `cross` groups are
    written by the encoder Program and read by the decoder. `conv`: input rows of a causal
    convolution, one head without V, at least fp32; `window` is the number of taps. `state`: a
    recurrence's heads of `k_width` columns with `v_width` values each, at least fp32; a request has
    one block with two states, each with its number of tokens.
    """

    name: str
    kind: GroupKind
    num_layers: int
    num_kv_heads: int
    k_width: int
    v_width: int
    window: int | None = None
    """Number of keys that a query sees, including its own; None: all previous ones."""
    one_step: bool = False
    """Whether only the step that writes the keys reads them, as in encoder self-attention."""
    of_input: bool = False
    """Whether the keys belong to the encoder's input while the request's tokens are the decoder's.
    """

    @property
    def kv_kind(self) -> KVCacheKind:
        """Lifetime of the group's blocks."""
        return "step" if self.one_step else LIVES[self.kind]


@dataclass(frozen=True, slots=True)
class Op:
    """Base class of ops; field annotations tell inputs, outputs, weights and attributes apart.

    Fields named `out` or `outs` are outputs; every other Value is an input.
    """

    @property
    def kind(self) -> str:
        return type(self).__name__

    @property
    def inputs(self) -> tuple[Value, ...]:
        return tuple(
            value
            for name in self._holders(Value)
            if name not in MADE
            for value in _flat(getattr(self, name), Value)
        )

    @property
    def outputs(self) -> tuple[Value, ...]:
        return tuple(
            value
            for name in self._holders(Value)
            if name in MADE
            for value in _flat(getattr(self, name), Value)
        )

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(
            weight
            for name in self._holders(Weight)
            for weight in _flat(getattr(self, name), Weight)
        )

    def on(self, values: Mapping[Value, Value]) -> Self:
        """Returns the op with Values replaced according to `values`."""

        def new(item: Any) -> Any:
            return tuple(map(new, item)) if isinstance(item, tuple) else values.get(item, item)

        return replace(self, **{name: new(getattr(self, name)) for name in self._holders(Value)})

    def _holders(self, kind: type[Value | Weight]) -> tuple[str, ...]:
        return _holders(type(self), kind)  # type: ignore[arg-type]  # mypy takes the hash of an op for that of its class


@cache
def _holders(owner: Any, kind: type[Any]) -> tuple[str, ...]:
    """Returns the dataclass fields whose annotation mentions `kind`, which is Value or Weight."""
    others = PLAIN_TYPES | {"Value", "Weight"} - {kind.__name__}
    return tuple(
        entry.name for entry in fields(owner) if set(re.findall(r"\w+", str(entry.type))) - others
    )


def _flat(item: object, kind: type[Any]) -> Iterator[Any]:
    """Yields every instance of `kind` in an attribute, recursing into tuples and dataclasses."""
    if isinstance(item, kind):
        yield item
    elif isinstance(item, tuple):
        for part in item:
            yield from _flat(part, kind)
    elif item is not None and is_dataclass(item):
        for name in _holders(type(item), kind):  # type: ignore[arg-type]
            yield from _flat(getattr(item, name), kind)


@dataclass(frozen=True, slots=True)
class Program:
    """One runnable part of a model (decoder, encoder, draft ...).

    `inputs` and `outputs` are named Values ("token_ids" or "hidden" in; "logits", "hidden" or
    "pooled" out). `groups` may be shared by name with the model's other Programs. Every Value is
    computed before it is read.
    """

    name: str
    inputs: dict[str, Value]
    outputs: dict[str, Value]
    ops: tuple[Op, ...]
    groups: tuple[CacheGroup, ...] = ()
    vocab_size: int = 0

    def group(self, name: str) -> CacheGroup:
        return self.groups[self.group_index(name)]

    def group_index(self, name: str) -> int:
        """Returns the index of the group in block tables and slots `[G, ...]`."""
        return next(i for i, group in enumerate(self.groups) if group.name == name)

    @property
    def input_groups(self) -> tuple[int, ...]:
        """Indices of groups with keys of the encoder's input."""
        return tuple(
            index
            for index, group in enumerate(self.groups)
            if group.of_input or group.kind == "cross"
        )

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All weights, each once, in order of first use."""
        return tuple(dict.fromkeys(w for op in self.ops for w in op.weights))

    def check(self) -> None:
        """Raises ValueError if an op reads a Value before it is computed, computes one twice, or
        names an unknown axis or group.
        """
        produced: dict[str, Value] = {}
        for value in self.inputs.values():
            self._check_made(value, "an input", produced)
            produced[value.name] = value
        names = {group.name for group in self.groups}
        for op in self.ops:
            for value in op.inputs:
                if produced.get(value.name) != value:
                    raise ValueError(
                        f"{self.name}: {op.kind} reads {value.name}, which no earlier op makes"
                    )
            for value in op.outputs:
                self._check_made(value, op.kind, produced)
                produced[value.name] = value
            group = getattr(op, "group", None)
            if group is not None and group not in names:
                raise ValueError(
                    f"{self.name}: {op.kind} uses the cache group {group}, known are"
                    f" {sorted(names)}"
                )
        for value in self.outputs.values():
            if produced.get(value.name) != value:
                raise ValueError(f"{self.name}: the output {value.name} is never made")

    def _check_made(self, value: Value, maker: str, produced: Mapping[str, Value]) -> None:
        if value.name in produced:
            raise ValueError(f"{self.name}: {maker} makes {value.name} a second time")
        if value.axis not in get_args(Axis):
            raise ValueError(
                f"{self.name}: {maker} makes {value.name} on the axis {value.axis}, known are"
                f" {', '.join(get_args(Axis))}"
            )
