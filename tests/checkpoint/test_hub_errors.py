"""What an error of the hub or of the disk becomes for who asked for a model."""

from __future__ import annotations

import errno

import httpx2
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from octavo.api.errors import DiskFull, DownloadFailed, GatedModel, NotOnHub
from octavo.checkpoint.hub_errors import describe_hub_error, get_error_kind
from octavo.config.model_reference import parse_hub_reference
from octavo.server.http.errors import make_fault


def answer(status):
    return httpx2.Response(status, request=httpx2.Request("GET", "https://huggingface.co"))


@pytest.mark.parametrize(
    ("error", "kind", "status", "words"),
    [
        (GatedRepoError("x", response=answer(403)), GatedModel, 403, "accept its terms"),
        (
            HfHubHTTPError("x", response=answer(401)),
            GatedModel,
            403,
            "refuses it (401): set HF_TOKEN",
        ),
        (
            HfHubHTTPError("x", response=answer(403)),
            GatedModel,
            403,
            "refuses it (403): set HF_TOKEN",
        ),
        (HfHubHTTPError("x", response=answer(500)), DownloadFailed, 502, "failed: x"),
        (RepositoryNotFoundError("x", response=answer(404)), NotOnHub, 404, "no such repository"),
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull, 507, "not enough disk space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), DiskFull, 507, "Disk quota exceeded"),
        (OSError(errno.EACCES, "Permission denied"), DownloadFailed, 502, "Permission denied"),
    ],
)
def test_each_kind_has_its_status_and_a_sentence(error, kind, status, words):
    assert get_error_kind(error) is kind
    reference = parse_hub_reference("maker/model")
    assert reference is not None
    said = describe_hub_error(reference, error)
    assert words in said and "\n" not in said
    assert make_fault(kind(said)).status == status
