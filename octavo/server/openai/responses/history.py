"""Earlier items of a response's conversation: from previous responses, and referenced by id."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from octavo.api.errors import InvalidRequest, shown
from octavo.server.ignored import IgnoredFields
from octavo.server.openai.responses.items import REFERENCE
from octavo.server.state.store import Record, Store

ENDED = ("completed", "incomplete", "failed", "cancelled")
MAX_TURNS = 1000
"""Maximum number of previous responses in a conversation."""
OUTPUT_ID = re.compile(r"(?:msg|rs|fc|mcp|mcpl)_(?P<hash>[0-9a-f]{48})\d*")
"""Ids of output items, which contain their response's id."""

Item = dict[str, Any]


async def get_previous_items(previous: str | None, owner: str, store: Store | None) -> list[Item]:
    """Returns the items of a conversation up to the response `previous`, oldest first. Raises
    InvalidRequest if a response is missing or has not ended.
    """
    turns: list[list[Item]] = []
    async with aclosing(_previous_responses(previous, owner, store)) as records:
        async for name, record in records:
            if record is None:
                raise InvalidRequest(
                    f"Previous response with id '{name}' not found.",
                    param="previous_response_id",
                    hint="responses are kept only if they were created with store=true",
                )
            _check_ended(record)
            if len(turns) == MAX_TURNS:
                raise InvalidRequest(
                    f"previous_response_id: the conversation has more than {MAX_TURNS} turns",
                    hint="send its items as input",
                    param="previous_response_id",
                )
            turns.append(_get_items(record))
    return [item for turn in reversed(turns) for item in turn]


async def get_input_items(record: Record, store: Store) -> list[Item]:
    """Returns all input items of a stored response, oldest first, including previous responses that
    have not been deleted.
    """
    turns = [record.body["items"]]
    previous = record.body["response"]["previous_response_id"]
    async with aclosing(_previous_responses(previous, record.owner, store)) as records:
        async for _, previous_record in records:
            if previous_record is None or len(turns) > MAX_TURNS:
                break
            turns.append(_get_items(previous_record))
    return [item for turn in reversed(turns) for item in turn]


async def resolve_references(
    items: Sequence[Item], owner: str, store: Store | None, ignored: IgnoredFields
) -> list[Item]:
    """Replaces references by the items they refer to. References to other servers' items are
    ignored; raises InvalidRequest for an id of this server that the owner does not have.
    """
    resolved: list[Item] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item["type"] != REFERENCE:
            resolved.append(item)
        elif OUTPUT_ID.fullmatch(item["id"]) is None:
            reason = "it refers to an item of another server"
            ignored.add(where, reason, shown_as=f"input[type={REFERENCE}]")
        else:
            resolved.append(await _find_reference(item["id"], f"{where}.id", owner, store))
    return resolved


async def _find_reference(item_id: str, where: str, owner: str, store: Store | None) -> Item:
    match = OUTPUT_ID.fullmatch(item_id)
    record = None
    if match is not None and store is not None:
        record = await store.find("response", f"resp_{match['hash']}", owner)
    output: list[Item] = [] if record is None else record.body["response"]["output"]
    for item in output:
        if item["id"] == item_id:
            return item
    raise InvalidRequest(
        f"{where}: no item {shown(item_id)} of a stored response",
        hint="send the item itself",
        param=where,
    )


async def _previous_responses(
    previous: str | None, owner: str, store: Store | None
) -> AsyncGenerator[tuple[str, Record | None], None]:
    """Yields (id, record) of a conversation's responses, newest first, up to the first
    missing one.
    """
    while previous is not None:
        record = await store.find("response", previous, owner) if store is not None else None
        yield previous, record
        if record is None:
            return
        previous = record.body["response"]["previous_response_id"]


def _get_items(record: Record) -> list[Item]:
    """Returns a response's input and output items."""
    return [*record.body["items"], *record.body["response"]["output"]]


def _check_ended(record: Record) -> None:
    status = record.body["response"]["status"]
    if status not in ENDED:
        raise InvalidRequest(
            f"previous_response_id: '{record.id}' is still {status}",
            hint="wait until it has finished",
            param="previous_response_id",
        )
