"""Request fields of SamplingParams that no dialect has of its own: filters of whole distributions,
mirostat, DRY and stop_regex. Names are llama.cpp's where it has them.
"""

from __future__ import annotations

from octavo.server.fields import add_sampling_fields
from octavo.server.http.body import Body


@add_sampling_fields
class FilterBody(Body):
    """Base of the bodies with sampling options."""


FILTER_FIELDS = tuple(FilterBody.model_fields)
"""Fields that go to SamplingParams unchanged, in every API that takes them."""
