"""SamplingParams fields that are in none of the APIs: filters of the full distribution, mirostat,
DRY and stop_regex. Names are llama.cpp's if it has them.
"""

from __future__ import annotations

from octavo.server.fields import add_sampling_fields
from octavo.server.http.body import Body


@add_sampling_fields
class FilterBody(Body):
    """Base class of bodies with sampling parameters."""


FILTER_FIELDS = tuple(FilterBody.model_fields)
"""Fields copied to SamplingParams unchanged, in every API."""
