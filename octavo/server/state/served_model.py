"""One served model, as a route works with it: its public name, its engine, its metrics.

Made for one HTTP request by `Service.model`; knows no wire format.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.api.async_llm import AsyncLLM
from octavo.engine.protocol.step import AdapterRef
from octavo.server.http.request_limits import RequestLimits
from octavo.server.state.model_formats import ModelFormats
from octavo.server.state.model_metrics import ModelMetrics
from octavo.server.state.model_uses import ModelUses
from octavo.server.state.request_record import RequestRecord
from octavo.text.ports import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready for new requests."""

    name: str
    """Public name, which clients send and answers repeat."""
    llm: AsyncLLM
    metrics: ModelMetrics
    limits: RequestLimits
    record: RequestRecord
    """Record of the HTTP request that asks for work."""
    formats: ModelFormats
    """Formats of its calls and its reasoning."""
    adapter: AdapterRef | None = None
    """Adapter that its requests are computed with; None: the plain model."""
    uses: ModelUses = field(default_factory=ModelUses)
    load_s: float = 0.0
    """Seconds for which the request waited for the model's load."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with skip_tokenizer_init."""
        if self.llm.config.model.skip_tokenizer_init:
            return None
        return self.llm.get_tokenizer()
