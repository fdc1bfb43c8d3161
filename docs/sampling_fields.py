"""Writes csrc/kernels/sampling_fields.h: fields and filters of SamplingRecord for
the C++ kernels, from the dtype that NumPy uses.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from octavo.api.sampling_options import FilterKind
from octavo.api.sampling_params import OPTIONS
from octavo.executor.batch import SAMPLING_RECORD

HEADER = Path(__file__).parents[1] / "csrc" / "kernels" / "sampling_fields.h"
TYPES = {"uint64": "uint64_t", "uint32": "uint32_t", "int32": "int32_t", "float32": "float"}
FILTERS: dict[FilterKind, str] = {
    "distribution": "OCTAVO_DISTRIBUTION_FILTERS",
    "after_cutoff": "OCTAVO_AFTER_CUTOFF_FILTERS",
}


def sampling_fields() -> str:
    """Returns the header's text."""
    assert SAMPLING_RECORD.names is not None
    fields = [f"X({TYPES[SAMPLING_RECORD[name].name]}, {name})" for name in SAMPLING_RECORD.names]
    parts = [
        "// Written by docs/generate.py from octavo/api/sampling_params.py. Do not edit.",
        "#pragma once",
        "// clang-format off",
        "// X(type, name) of each field of SamplingRecord, in order.\n"
        + _macro("OCTAVO_SAMPLING_FIELDS", fields),
    ]
    for kind, macro in FILTERS.items():
        rows = [
            f"X({name}, {option.default:g})"
            for name, option in OPTIONS.record.items()
            if option.filter == kind
        ]
        parts.append(f"// X(name, neutral value) of each {kind} filter.\n" + _macro(macro, rows))
    return "\n\n".join(parts) + "\n"


def _macro(name: str, rows: Iterable[str]) -> str:
    return " \\\n    ".join([f"#define {name}(X)", *rows])
