"""A model as routes use it, created for each HTTP request by `Service.model`."""

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
    name: str
    """Public name, as sent by clients and returned in responses."""
    llm: AsyncLLM
    metrics: ModelMetrics
    limits: RequestLimits
    record: RequestRecord
    """Record of the HTTP request."""
    formats: ModelFormats
    """Formats of tool calls and reasoning."""
    adapter: AdapterRef | None = None
    """LoRA adapter of the request; None: the base model."""
    uses: ModelUses = field(default_factory=ModelUses)
    load_s: float = 0.0
    """Seconds that the request waited for the model to load."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with skip_tokenizer_init."""
        if self.llm.config.model.skip_tokenizer_init:
            return None
        return self.llm.get_tokenizer()
