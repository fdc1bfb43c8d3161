"""What a response's conversation holds before its own input: the items of earlier responses, and
those that its input names by their ids.
"""

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
"""Most earlier responses that one conversation is rebuilt from."""
OUTPUT_ID = re.compile(r"(?:msg|rs|fc)_(?P<hash>[0-9a-f]{48})\d*")
"""Ids of the items of answers, which name their response."""

Item = dict[str, Any]


async def items_before(previous: str | None, owner: str, store: Store | None) -> list[Item]:
    """Returns the items of a conversation up to the response `previous`, oldest first; raises
    InvalidRequest where one of its responses is not there, or has not ended.
    """
    turns: list[list[Item]] = []
    async with aclosing(_earlier(previous, owner, store)) as records:
        async for name, record in records:
            if record is None:
                raise InvalidRequest(
                    f"Previous response with id '{name}' not found.", param="previous_response_id"
                )
            _check_ended(record)
            if len(turns) == MAX_TURNS:
                raise InvalidRequest(
                    f"previous_response_id: the conversation has more than {MAX_TURNS} turns",
                    hint="send its items as input",
                    param="previous_response_id",
                )
            turns.append(_items_of(record))
    return [item for turn in reversed(turns) for item in turn]


async def items_given(record: Record, store: Store) -> list[Item]:
    """Returns all items that a stored response was made from, oldest first, without those of
    earlier responses that have been deleted since.
    """
    turns = [record.body["items"]]
    previous = record.body["response"]["previous_response_id"]
    async with aclosing(_earlier(previous, record.owner, store)) as records:
        async for _, found in records:
            if found is None or len(turns) > MAX_TURNS:
                break
            turns.append(_items_of(found))
    return [item for turn in reversed(turns) for item in turn]


async def resolved(
    items: Sequence[Item], owner: str, store: Store | None, ignored: IgnoredFields
) -> list[Item]:
    """Returns items with what each reference names in its place. One of another server's ids is
    ignored; raises InvalidRequest for one of this server's that is in none of an owner's answers.
    """
    found: list[Item] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item["type"] != REFERENCE:
            found.append(item)
        elif OUTPUT_ID.fullmatch(item["id"]) is None:
            reason = "it names an item of another server"
            ignored.add(where, reason, shown_as=f"input[type={REFERENCE}]")
        else:
            found.append(await _referenced(item["id"], f"{where}.id", owner, store))
    return found


async def _referenced(item_id: str, where: str, owner: str, store: Store | None) -> Item:
    match = OUTPUT_ID.fullmatch(item_id)
    record = None
    if match is not None and store is not None:
        record = await store.find("response", f"resp_{match['hash']}", owner)
    output: list[Item] = [] if record is None else record.body["response"]["output"]
    for item in output:
        if item["id"] == item_id:
            return item
    raise InvalidRequest(
        f"{where}: no item {shown(item_id)} of a stored answer",
        hint="send the item itself",
        param=where,
    )


async def _earlier(
    previous: str | None, owner: str, store: Store | None
) -> AsyncGenerator[tuple[str, Record | None], None]:
    """Yields (id, record) of a conversation's responses, newest first; ends with the first that is
    not there.
    """
    while previous is not None:
        record = await store.find("response", previous, owner) if store is not None else None
        yield previous, record
        if record is None:
            return
        previous = record.body["response"]["previous_response_id"]


def _items_of(record: Record) -> list[Item]:
    """Returns what a response was given and what it answered."""
    return [*record.body["items"], *record.body["response"]["output"]]


def _check_ended(record: Record) -> None:
    status = record.body["response"]["status"]
    if status not in ENDED:
        raise InvalidRequest(
            f"previous_response_id: '{record.id}' is {status} still",
            hint="wait until it has ended",
            param="previous_response_id",
        )
