"""What a step is told of the last tokens that its permanent rows have drawn, which the device keeps
(`base.LastTokens`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.backends.batch import LastTokens


def source_arrays(last: LastTokens | None) -> dict[str, NDArray]:
    """`last_sources [T]`, -1 where the id is known here; nothing where all are."""
    if last is None or not (last.sources >= 0).any():
        return {}
    return {"last_sources": last.sources.astype(np.int64)}


def target_arrays(last: LastTokens | None, samples: slice, *, spare: int) -> dict[str, NDArray]:
    """`last_targets [S]` of some sampled rows; what is nobody's goes to the row `spare`."""
    if last is None:
        return {}
    targets = last.targets[samples].astype(np.int64)
    return {"last_targets": np.where(targets < 0, spare, targets)}
