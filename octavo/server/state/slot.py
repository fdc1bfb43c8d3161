"""The slot of the server's engine: loading, ready or draining.

The engine comes some time after the server has begun to listen, and goes before it ends; requests
in between get a 503.
"""

from __future__ import annotations

from octavo.async_llm import AsyncLLM
from octavo.errors import Unavailable


class EngineSlot:
    """An engine that is loading, ready or draining."""

    def __init__(self, llm: AsyncLLM | None = None) -> None:
        self._llm = llm
        self._progress = "starting"
        self._draining = False

    @property
    def llm(self) -> AsyncLLM:
        """The engine, for new work; raises Unavailable while loading and while draining."""
        if self._draining:
            raise Unavailable("the server is stopping")
        if self._llm is None:
            raise Unavailable(
                f"the server is not ready yet: {self._progress}", hint="try again in a few seconds"
            )
        return self._llm

    @property
    def loaded(self) -> AsyncLLM | None:
        """The engine for readers of its state, ready or draining; None while it loads."""
        return self._llm

    @property
    def is_draining(self) -> bool:
        return self._draining

    def report(self, text: str) -> None:
        """Notes the progress of the load, which a 503 quotes."""
        self._progress = text

    def fill(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def drain(self) -> None:
        """Refuses new work from now on; running requests go on."""
        self._draining = True

    def close(self) -> None:
        """Ends the engine; streams that still run get an error."""
        self.drain()
        if self._llm is not None:
            self._llm.close()


def served_name(llm: AsyncLLM) -> str:
    """Returns the model's public name, which clients send."""
    return llm.config.model.served_model_name or llm.config.model.model
