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
        LocalEntryNotFoundError: "Hugging Face, which may have it, cannot be reached from here, and"
        " it is not in the cache",
        GatedRepoError: "Hugging Face gives it only to who has accepted its terms at"
        f" https://huggingface.co/{name} and sends a token (HF_TOKEN)",
        RevisionNotFoundError: f"Hugging Face has no revision {reference.revision} of {name}",
        RepositoryNotFoundError: "Hugging Face has no such repository, or none that is open without"
        " a token",
    }
    for kind, text in kinds.items():
        if isinstance(error, kind):
            return text
    if isinstance(error, HfHubHTTPError) and error.response.status_code in REFUSED:
        status = error.response.status_code
        return f"Hugging Face refuses it ({status}): HF_TOKEN names a token that may read it"
    if isinstance(error, OSError) and error.errno in DISK_FULL_CODES:
        return f"there is no room for it: {error.strerror} (HF_HOME names another place)"
    lines = str(error).strip().splitlines()
    return f"fetching it from Hugging Face failed: {lines[0] if lines else type(error).__name__}"
