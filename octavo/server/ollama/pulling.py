"""POST /api/pull, POST /api/copy and DELETE /api/delete, for operators.

Source: Ollama's API reference. A model is given by short name or hub repository, never by local
path.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import JSONResponse

from octavo.api.errors import InvalidRequest, shown
from octavo.checkpoint.catalogue import CATALOGUE, short_name
from octavo.config.model_reference import parse_hub_reference
from octavo.server.http.auth import require_operator
from octavo.server.http.body import parse_body
from octavo.server.http.connection import cancel_on_disconnect
from octavo.server.ollama.bodies import CopyBody, DeleteBody, PullBody
from octavo.server.ollama.formatter import LineStream
from octavo.server.ollama.names import LATEST, known_name
from octavo.server.state.adapters import NAME
from octavo.server.state.service import Service, get_service
from octavo.utils.progress import FileProgress

SHOWN_DIGITS = 12
"""Number of digits of a digest in a status."""

router = APIRouter()


@router.post(
    "/api/pull",
    dependencies=[Depends(require_operator)],
    response_class=Response,
    responses={200: {"content": {LineStream.media_type: {}}}},
)
async def pull(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[PullBody, Depends(parse_body(PullBody))],
) -> Response:
    """Downloads a model with progress, and registers it for requests to load."""
    name = _name_to_pull(body.known_as)
    lines = _progress(service, name)
    if body.stream is not False:
        return LineStream(lines)
    last = await cancel_on_disconnect(request.receive, _last(lines))
    return JSONResponse(last)


@router.delete("/api/delete", dependencies=[Depends(require_operator)])
async def delete(
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[DeleteBody, Depends(parse_body(DeleteBody))],
) -> Response:
    """Removes a model and deletes its files from this machine's caches."""
    await service.known.delete(known_name(service, body.known_as))
    return Response()


@router.post("/api/copy", dependencies=[Depends(require_operator)])
async def copy(
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[CopyBody, Depends(parse_body(CopyBody))],
) -> Response:
    """Adds an alias of a model."""
    source = await service.residency.find(known_name(service, body.source))
    await service.known.copy(source, body.destination.removesuffix(LATEST))
    return Response()


def _name_to_pull(text: str) -> str:
    """Returns the name of a model to pull; raises InvalidRequest if it is invalid."""
    short, reference = short_name(text), parse_hub_reference(text)
    if short is not None:
        return short
    name = str(reference) if "://" in text else text.removesuffix(LATEST)
    if reference is None or not NAME.fullmatch(name):
        raise InvalidRequest(
            f"model: got {shown(text)}, expected {', '.join(CATALOGUE)}, or OWNER/REPO,"
            " OWNER/REPO:QUANT or OWNER/REPO/FILE.gguf on Hugging Face",
            param="model",
        )
    return name


async def _progress(service: Service, name: str) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Yields the progress lines of a pull; the last one reports success."""
    yield [{"status": "pulling manifest"}]
    download = service.pulls.start(name)
    async with aclosing(download.follow()) as changes:
        async for changed in changes:
            yield [_line(file_progress) for file_progress in changed]
    yield [{"status": "verifying sha256 digest"}, {"status": "writing manifest"}]
    await service.known.add_pulled(name, await download.path())
    yield [{"status": "success"}]


def _line(progress: FileProgress) -> dict[str, Any]:
    digest = progress.sha256
    return {
        "status": f"pulling {digest[:SHOWN_DIGITS]}",
        "digest": f"sha256:{digest}",
        "total": progress.num_bytes,
        "completed": progress.completed_bytes,
    }


async def _last(lines: AsyncGenerator[list[dict[str, Any]], None]) -> dict[str, Any]:
    """Returns the last line of a finished pull."""
    last: dict[str, Any] = {}
    async with aclosing(lines):
        async for some in lines:
            last = some[-1]
    return last
