"""Tile sizes of each Triton kernel, read from `tuned.json`, which `benchmarks/tune_triton.py`
writes. Nothing is tuned at run time.

A table row specifies a kernel, a device (a compute capability such as "sm_90"; "*": any), a shape
and the launch; the most specific matching row applies. Rows for any device are typical values, not
measurements. Tiles for "interpreter" are large, because there each tile operation costs the same,
whatever its size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("tuned.json")
ANY = "*"

Shape = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class TunedLaunch:
    """A table row: how to launch a kernel for a shape on a device."""

    kernel: str
    device: str
    shape: Shape
    """Required properties of a call, such as {"width": 128, "kv": "bfloat16"}."""
    launch: Mapping[str, int]
    """Tile sizes, `num_warps` and `num_stages`."""

    def holds(self, kernel: str, device: str, shape: Shape) -> bool:
        return (
            self.kernel == kernel
            and self.device in (device, ANY)
            and self.shape.items() <= shape.items()
        )

    @property
    def weight(self) -> tuple[bool, int]:
        """Sort key for specificity: first rows for the exact device, then the number of shape
        properties.
        """
        return self.device != ANY, len(self.shape)


def tuned(kernel: str, device: str, **shape: int | str) -> dict[str, int]:
    """Returns the launch of a kernel for a shape on a device (named by `device.device_name`)."""
    return dict(best_row(kernel, device, tuple(sorted(shape.items()))).launch)


def is_measured(kernel: str, device: str, **shape: int | str) -> bool:
    """Returns whether the launch that `tuned` returns was measured on this device."""
    return best_row(kernel, device, tuple(sorted(shape.items()))).device != ANY


@cache
def best_row(kernel: str, device: str, shape: tuple[tuple[str, int | str], ...]) -> TunedLaunch:
    found = [row for row in table() if row.holds(kernel, device, dict(shape))]
    if not found:
        raise KeyError(
            f"{TABLE.name} has no row for the kernel {kernel} on {device}, nor for any device"
        )
    return max(found, key=lambda row: row.weight)


@cache
def table() -> tuple[TunedLaunch, ...]:
    return read(TABLE)


def read(path: Path) -> tuple[TunedLaunch, ...]:
    return tuple(TunedLaunch(**row) for row in json.loads(path.read_text()))


def write(path: Path, rows: Iterable[TunedLaunch]) -> None:
    """Writes a sorted table, one row per line; the last of several rows for the same key wins."""
    last = {(row.kernel, row.device, tuple(sorted(row.shape.items()))): row for row in rows}
    lines = (json.dumps(asdict(last[key])) for key in sorted(last, key=str))
    path.write_text("[\n  " + ",\n  ".join(lines) + "\n]\n")
