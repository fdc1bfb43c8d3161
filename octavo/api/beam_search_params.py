"""BeamSearchParams of `LLM.beam_search`. Names, defaults and ranges are vLLM's."""

from __future__ import annotations

from typing import Literal

import msgspec

from octavo.api.checked_call import CheckedCall
from octavo.api.errors import InvalidRequest
from octavo.api.sampling_options import MAX_BEAMS
from octavo.api.sampling_params import OPTIONS, SamplingParams
from octavo.api.structured_outputs import StructuredOutputs


class BeamSearchParams(msgspec.Struct, kw_only=True, metaclass=CheckedCall):
    """Parameters of `LLM.beam_search`. Elsewhere, the same fields of SamplingParams start
    a search.
    """

    beam_width: int
    max_tokens: int | None
    n: int | None = None
    """Number of sequences returned; None: beam_width."""
    ignore_eos: bool = False
    temperature: float = 0.0
    """Ignored: a beam search samples nothing. Allowed are 0 and 1."""
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if self.beam_width is None:  # SamplingParams would take it for "no search"
            raise InvalidRequest(
                f"beam_width: got None, expected an integer from 1 to {MAX_BEAMS}",
                param="beam_width",
            )
        OPTIONS["beam_width"].parse(self.beam_width)  # before n, which is the width by default
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        fields = msgspec.structs.asdict(self)
        return SamplingParams(**fields | {"n": self.beam_width if self.n is None else self.n})
