from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def listing(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Returns one page of OpenAI's paginated lists."""
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
