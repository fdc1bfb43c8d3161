"""GET /v1/engine/recording and GET /v1/engine/recording/CHUNK: a recording for the page.

Only the server of `octavo replay --serve` has these routes. A chunk's frames are the events of
docs/concepts/engine-events.md, one for each step; the first is a snapshot.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from octavo.server.state.shown_recording import FRAMES_IN_CHUNK, ShownRecording

router = APIRouter()


async def get_recording(request: Request) -> ShownRecording:
    recording: ShownRecording = request.app.state.recording
    return recording


Recording = Annotated[ShownRecording, Depends(get_recording)]


@router.get("/v1/engine/recording")
async def about(recording: Recording) -> dict[str, Any]:
    """Reports how much of the recording has been read so far."""
    is_complete = recording.is_complete  # read first: the number of frames still grows
    return {
        "object": "recording",
        "file": recording.name,
        "num_frames": recording.num_frames,
        "frames_in_chunk": FRAMES_IN_CHUNK,
        "is_complete": is_complete,
        "problem": recording.problem,
    }


@router.get("/v1/engine/recording/{number}")
async def chunk(number: int, recording: Recording) -> Response:
    """Returns the frames of one chunk."""
    return Response(recording.chunk(number), media_type="application/json")
