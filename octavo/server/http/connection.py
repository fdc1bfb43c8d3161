"""Cancels a request's work when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

ResultT = TypeVar("ResultT")


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Returns the work's result; on a disconnect cancels it and raises ClientDisconnect.

    The request's body must have been read before.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait({task, gone})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
