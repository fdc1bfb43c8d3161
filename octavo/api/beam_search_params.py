"""BeamSearchParams: a beam search as `LLM.beam_search` takes it. Names, defaults and ranges are
vLLM's.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from octavo.api.checked_call import CheckedCall
from octavo.api.errors import InvalidRequest
from octavo.api.sampling_options import MAX_BEAMS
from octavo.api.sampling_params import OPTIONS, SamplingParams
from octavo.api.structured_outputs import StructuredOutputs


class BeamSearchParams(msgspec.Struct, kw_only=True, metaclass=CheckedCall):
    """A beam search, as `LLM.beam_search` takes it; checked when made. Everywhere else the same
    fields of SamplingParams ask for one.
    """

    beam_width: int
    max_tokens: int | None
    n: int | None = None
    """Number of the best sequences that are returned; None: beam_width."""
    ignore_eos: bool = False
    temperature: float = 0.0
    """A search draws nothing; allowed are 0 and 1, which mean the same."""
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    """Form that every sequence has; None: any text."""

    def __post_init__(self) -> None:
        if self.beam_width is None:  # SamplingParams would take it for "no search"
            raise InvalidRequest(
                f"beam_width: got None, allowed is a whole number from 1 to {MAX_BEAMS}",
                param="beam_width",
            )
        OPTIONS["beam_width"].parse(self.beam_width)  # before n, which is the width by default
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """Returns the SamplingParams that ask for this search."""
        fields = msgspec.structs.asdict(self)
        return SamplingParams(**fields | {"n": self.beam_width if self.n is None else self.n})
