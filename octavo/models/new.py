"""GTE under the model type of its first release."""

from __future__ import annotations

from octavo.models.gte import build

__all__ = ["build"]
