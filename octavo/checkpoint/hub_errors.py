"""Translates errors of huggingface-hub and the disk into messages for the user."""

from __future__ import annotations

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from octavo.api.errors import DISK_FULL_CODES, DiskFull, DownloadFailed, GatedModel, NotOnHub
from octavo.config.model_reference import HubReference

REFUSED = (401, 403)

MISSING = (HFValidationError, RevisionNotFoundError, RepositoryNotFoundError)


def get_error_kind(error: Exception) -> type[DownloadFailed]:
    """Returns the error class for users: NotOnHub, GatedModel, DiskFull or DownloadFailed."""
    if isinstance(error, GatedRepoError):
        return GatedModel
    if isinstance(error, MISSING):
        return NotOnHub
    if isinstance(error, HfHubHTTPError) and error.response.status_code in REFUSED:
        return GatedModel
    is_full = isinstance(error, OSError) and error.errno in DISK_FULL_CODES
    return DiskFull if is_full else DownloadFailed


def describe_hub_error(reference: HubReference, error: Exception) -> str:
    """Returns why a model could not be downloaded, as the end of a sentence."""
    name = reference.repository
    kinds: dict[type[Exception], str] = {
        HFValidationError: "not the name of a Hugging Face repository (OWNER/REPO)",
        LocalEntryNotFoundError: "not in the cache, and Hugging Face cannot be reached",
        GatedRepoError: f"the model is gated: accept its terms at https://huggingface.co/{name} and"
        " set HF_TOKEN",
        RevisionNotFoundError: f"Hugging Face has no revision {reference.revision} of {name}",
        RepositoryNotFoundError: "no such repository on Hugging Face, or a token is required",
    }
    for kind, text in kinds.items():
        if isinstance(error, kind):
            return text
    if isinstance(error, HfHubHTTPError) and error.response.status_code in REFUSED:
        status = error.response.status_code
        return f"Hugging Face refuses it ({status}): set HF_TOKEN to a token with read access"
    if isinstance(error, OSError) and error.errno in DISK_FULL_CODES:
        return f"not enough disk space: {error.strerror} (set HF_HOME to use another directory)"
    lines = str(error).strip().splitlines()
    return f"the download from Hugging Face failed: {lines[0] if lines else type(error).__name__}"
