"""Models in Anthropic's format, for GET /v1/models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from octavo.api.errors import InvalidRequest
from octavo.server.state.slot import EngineSlot


def make_card(slot: EngineSlot) -> dict[str, Any]:
    context = slot.max_model_len
    return {
        "type": "model",
        "id": slot.name,
        "display_name": slot.name,
        "created_at": datetime.fromtimestamp(slot.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def make_page(
    slots: Sequence[EngineSlot], *, limit: int, after_id: str | None, before_id: str | None
) -> dict[str, Any]:
    """Returns a page of at most `limit` models after `after_id` or before `before_id`."""
    first, end = 0, len(slots)
    names = [slot.name for slot in slots]
    if after_id is not None:
        first = _index(names, after_id, "after_id") + 1
    if before_id is not None:
        end = _index(names, before_id, "before_id")
    page_slots = list(slots[first:end])
    shown = (
        page_slots[-limit:] if before_id is not None and after_id is None else page_slots[:limit]
    )
    return {
        "data": [make_card(slot) for slot in shown],
        "has_more": len(shown) < len(page_slots),
        "first_id": shown[0].name if shown else None,
        "last_id": shown[-1].name if shown else None,
    }


def _index(names: Sequence[str], name: str, param: str) -> int:
    if name not in names:
        raise InvalidRequest(
            f"{param}: got {name!r}, expected one of {', '.join(names)}", param=param
        )
    return names.index(name)
