"""Reads an adapter for one Program: finds the site of each of its modules and cuts its matrices to
the Program's.

Owns no bytes: what it returns goes into a backend's slot. An adapter none of whose modules is the
Program's, or one with a module that is not, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.checkpoint.peft import ModuleUpdate, PeftAdapter, bare_name, read_peft
from octavo.errors import WeightMismatch, did_you_mean
from octavo.program.low_rank import LowRank, Site, Updates
from octavo.program.ops import Linear
from octavo.program.passes.adapters import sites_of, tables_of
from octavo.program.program import Program, Weight

LoraDtype = Literal["auto", "float32", "bfloat16"]

HEADER_BYTES = 1 << 12
"""Bytes of a file's header that are more than enough for one module."""

SAME_MATRIX = 0.2
"""Largest error, as a share of the whole, of a packed matrix against the one it was packed from."""

Dequantize = Callable[[Weight], NDArray[np.float32]]
"""Gives the values of a weight as it is packed."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits its Program."""

    digest: bytes
    """A digest of its content."""
    updates: Updates

    @property
    def num_bytes(self) -> int:
        return sum(update.num_bytes for update in self.updates.values())


class AdapterReader:
    """Reads adapters of one Program, one rank's part of it or the whole."""

    def __init__(
        self,
        program: Program,
        dequantize: Dequantize,
        *,
        max_rank: int,
        dtype: LoraDtype = "auto",
        whole: Program | None = None,
    ) -> None:
        """Takes the whole Program, with its sites, where `program` is one rank's part of it."""
        everywhere = dict(sites_of(whole or program))
        self._elsewhere = frozenset(map(bare_name, everywhere))
        """Modules that this rank or another has."""
        self._shapes = list(map(_whole_shape, everywhere.values()))
        self._dequantize = dequantize
        self._max_rank = max_rank
        self._dtype = dtype
        self._sites: dict[str, list[Site]] = {}
        for site in dict.fromkeys(sites_of(program)):
            self._sites.setdefault(bare_name(site[0]), []).append(site)
        self._tables = tables_of(program)
        self._biases = _biases_of(program)

    def read(self, path: Path) -> Adapter:
        """Reads and checks an adapter; WeightMismatch or UnsupportedModel names what is wrong."""
        found = read_peft(path, max_rank=self._max_rank, max_bytes=self._max_bytes())
        updates: dict[Site, LowRank] = {}
        num_elsewhere = 0
        for update in found.updates.values():
            if update.module not in self._sites and update.module in self._elsewhere:
                num_elsewhere += 1
                continue
            for site in self._sites_of(update, found):
                if (low_rank := self._fitted(update, site, found)) is not None:
                    updates[site] = low_rank
        if not (updates or num_elsewhere):
            raise WeightMismatch(
                f"{path}: no tensor of the adapter changes a module of this model",
                hint="it was made for another model, or its files are damaged",
            )
        return Adapter(found.digest, updates)

    def _max_bytes(self) -> int:
        """Returns the bytes of the largest adapter there can be, with the tables saved along."""
        numbers = sum(
            self._max_rank * (rows + inputs) + 3 * rows + HEADER_BYTES
            for rows, inputs in self._shapes
        )
        tables = 2 * max((rows * inputs for rows, inputs in self._shapes), default=0)
        return 4 * (numbers + tables)

    def _sites_of(self, update: ModuleUpdate, found: PeftAdapter) -> list[Site]:
        """Returns the module's sites: a table's, or those of products."""
        sites = [
            site
            for site in self._sites.get(update.module, ())
            if (site in self._tables) == (update.is_table or self._is_base_table(update, site))
        ]
        if not sites:
            raise WeightMismatch(
                f"{found.path}: this model has no {'table' if update.is_table else 'linear'}"
                f" {update.module} that an adapter may change",
                hint=did_you_mean(update.module, self._sites),
            )
        return sites

    def _is_base_table(self, update: ModuleUpdate, site: Site) -> bool:
        """Whether an update holds nothing but a table's own rows, saved along."""
        return update.a is None and update.base is not None and self.is_table(site)

    def is_table(self, site: Site) -> bool:
        return site in self._tables

    def _fitted(self, update: ModuleUpdate, site: Site, found: PeftAdapter) -> LowRank | None:
        """Returns the part of a module's update that is a site's; None where it changes nothing."""
        self._check_base(update, site[1], found)
        a, b = self._matrices(update, site)
        self._check_shapes(update, site, (a, b), found)
        if self.is_table(site):
            return None if len(a) == 0 else self._table(update, site[1], a.T, b)
        weight = site[1]
        gain = None if update.magnitude is None else self._gain(update, weight, found)
        bias = self._bias(update, weight, gain, found)
        if len(a) == 0 and bias is None:
            return None
        span = weight.cut.inputs if weight.cut is not None else None
        mine = a if span is None else a[:, slice(*span)]
        return LowRank(np.ascontiguousarray(mine), b[_own(weight)], update.scale, gain, bias)

    def _table(self, update: ModuleUpdate, table: Weight, a: NDArray, b: NDArray) -> LowRank:
        return LowRank(np.ascontiguousarray(a[_own(table)]), b, update.scale)

    def _check_shapes(
        self,
        update: ModuleUpdate,
        site: Site,
        matrices: tuple[NDArray, NDArray],
        found: PeftAdapter,
    ) -> None:
        a, b = matrices
        rows, inputs = self._shape(site)
        for name, array, wanted in (
            ("A", a, (len(a), inputs)),
            ("B", b, (rows, len(a))),
            ("its magnitude", update.magnitude, (rows,)),
            ("its bias", update.bias, (rows,)),
            ("the bias of B", update.added_bias, (rows,)),
        ):
            if array is not None and array.shape != wanted:
                raise WeightMismatch(
                    f"{found.path}: {name} of {site[0]} has shape {array.shape}, this model wants"
                    f" {wanted}",
                    hint="the adapter was made for another model, or a file is damaged",
                )

    def _shape(self, site: Site) -> tuple[int, int]:
        """Returns the outputs and inputs of a module; a table's inputs are its rows."""
        shape = _whole_shape(site[1])
        return shape[::-1] if self.is_table(site) else shape

    def _matrices(self, update: ModuleUpdate, site: Site) -> tuple[NDArray, NDArray]:
        rows, inputs = self._shape(site)
        if update.a is None or update.b is None:
            return np.zeros((0, inputs), np.float32), np.zeros((rows, 0), np.float32)
        wanted = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}.get(self._dtype)
        if wanted is None:
            both = {update.a.dtype.name, update.b.dtype.name}
            wanted = ml_dtypes.bfloat16 if both == {"bfloat16"} else np.float32
        return update.a.astype(wanted), update.b.astype(wanted)

    def _gain(
        self, update: ModuleUpdate, weight: Weight, found: PeftAdapter
    ) -> NDArray[np.float32]:
        """Returns the gain of each output: its magnitude over the norm of its row, W + scale * B A.
        The norm is of whole rows, of which a rank may have a part.
        """
        assert update.a is not None and update.b is not None and update.magnitude is not None
        own = _own(weight)
        whole = self._dequantize(weight.whole)
        rows = weight.cut.rows if weight.cut is not None else None
        base = whole if rows is None else whole[slice(*rows)]
        a, b = update.a.astype(np.float64), update.b[own].astype(np.float64)
        norms = np.linalg.norm(base + update.scale * (b @ a), axis=1)
        if not norms.all():
            raise WeightMismatch(
                f"{found.path}: {update.module} has DoRA's gain over a row of zeros"
            )
        gain: NDArray[np.float32] = (update.magnitude[own] / norms).astype(np.float32)
        return gain

    def _bias(
        self,
        update: ModuleUpdate,
        weight: Weight,
        gain: NDArray[np.float32] | None,
        found: PeftAdapter,
    ) -> NDArray[np.float32] | None:
        """Returns what is added to the outputs beside the base's biases; None for nothing, as on
        ranks that have a later part of the inputs.
        """
        if weight.cut is not None and weight.cut.inputs is not None and weight.cut.inputs[0] > 0:
            return None
        own = _own(weight)
        total: NDArray[np.float32] | None = None
        if update.added_bias is not None:
            total = np.float32(update.scale) * update.added_bias[own]
            total = total if gain is None else total * gain
        if update.bias is not None:
            base = self._biases.get(weight)
            if base is None:
                raise WeightMismatch(
                    f"{found.path}: a bias of {update.module}, which has none in this model"
                )
            change = update.bias[own] - self._dequantize(base)
            total = change if total is None else total + change
        return total

    def _check_base(self, update: ModuleUpdate, weight: Weight, found: PeftAdapter) -> None:
        """Checks that a matrix of the base model that was saved along is this model's own."""
        if update.base is None:
            return
        own = _own(weight)
        shape = _whole_shape(weight)
        saved = update.base.astype(np.float32)
        saved = saved.T if weight.transposed and saved.shape == shape[::-1] != shape else saved
        if saved.shape == shape:
            mine = self._dequantize(weight)
            saved = saved[own]
            if weight.cut is not None and weight.cut.inputs is not None:
                saved = saved[:, slice(*weight.cut.inputs)]
            if np.linalg.norm(saved - mine) <= SAME_MATRIX * np.linalg.norm(saved):
                return
        raise WeightMismatch(
            f"{found.path}: {update.module} was saved along and is not this model's"
            f" ({update.base.shape} numbers beside {shape})",
            hint="the adapter trains it whole, or was made for another model",
        )


def _own(weight: Weight) -> slice | list[int]:
    """Returns the rows of the module's matrix that a weight is."""
    return slice(None) if weight.row_indices is None else list(weight.row_indices)


def _whole_shape(weight: Weight) -> tuple[int, int]:
    """Returns the outputs and inputs of the module that a matrix is, or is a part of."""
    return weight.tensor_rows, weight.whole.shape[-1]


def _biases_of(program: Program) -> dict[Weight, Weight]:
    """Returns the bias of each matrix that has one."""
    found: dict[Weight, Weight] = {}
    linears: Iterable[Linear] = (op for op in program.ops if isinstance(op, Linear))
    for op in linears:
        for weight, bias in zip(op.weights_, op.biases, strict=False):
            if bias is not None:
                found[weight] = bias
    return found
