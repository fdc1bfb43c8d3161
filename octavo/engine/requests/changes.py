"""A change of a request while it waits or runs, as the front sends it to the core.

Holds whole values, not differences: applying it twice, or to a request that another core resumes,
does no harm.
"""

from __future__ import annotations

import msgspec

from octavo.pooling_params import RequestParams


class RequestChange(msgspec.Struct):
    """New params and priority of one request. The front has checked them."""

    request_id: str
    params: RequestParams
    """All of its params; only what the worker does not know may differ from those before."""
    priority: int
    computes_here: bool = False
    """Whether it waits no more for blocks of another engine, and computes its prompt itself."""
