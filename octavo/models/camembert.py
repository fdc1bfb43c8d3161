"""CamemBERT: RoBERTa for French. Martin et al. 2020."""

from __future__ import annotations

from octavo.models.roberta import build

__all__ = ["build"]
