"""Optimistic sampling: sample first, verify the tokens against their grammars, and resample under a
mask only if needed. Exact, since a sample is the argmax of scores that belong to tokens: if the
grammar allows the token, it is the one that masked sampling gives.

A token that is not allowed is replaced by the only allowed token, or by the first allowed one of
the row's candidates; otherwise the row is resampled under a mask. Rows with top_p, top_k or min_p
are sampled without these cut-offs, and accepted if a few other allowed tokens prove that the
cut-offs keep the token (`executor/cutoff_proof.py`). Rows whose filters depend on the mask
(`SamplingParams.depends_on_mask`) are deferred: sampled once, under masks built together. Rows with
logits processors are resampled from processed logits, and rows with mirostat after each accepted
draft token.

If structured outputs are completed before their length limit, a token after which that is no longer
possible is replaced by the next token of the shortest completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import Bits, Resample, SampledLogits, SampleResult, unpacked_mask
from octavo.worker.sampling.best_legal import write_best_legal
from octavo.worker.sampling.grammar_matchers import GrammarMatchers, TextPosition
from octavo.worker.sampling.logits_processors import Logits, LogitsProcessors, ProcessorFault
from octavo.worker.sampling.sequential_sampling import SequentialSampling

CLOSE_TOKENS = 128
"""Tokens before the end of its length from which a text is completed."""


class SampleToVerify(NamedTuple):
    """One sampled row whose draw is looked at."""

    row: int
    """Permanent row."""
    num_drafts: int
    """Guesses that the draw is made after."""
    allowed: Bits | None
    """Ids that it may draw besides what its grammar says; None: any."""
    processors: Sequence[str]
    """Names of the processors that change its logits."""
    is_deferred: bool = False
    """Whether it is drawn only once its grammar's mask is known."""
    is_free: bool = False
    """Whether nothing but its grammar may ban a token."""
    skips_cutoffs: bool = False
    """Whether it is drawn without its cuts, which witnesses speak for."""
    closes: bool = False
    """Whether its text is completed before its length ends."""
    is_search: bool = False
    """Whether a beam search chooses by its best logprobs, which are those of legal tokens."""


class Texts(NamedTuple):
    """Tokens that draws follow: the first `ends [S]` of `token_ids [N, context]`."""

    token_ids: NDArray[np.int32]
    ends: NDArray[np.int32]
    max_num_tokens: Sequence[int]
    """Most tokens that each of the texts may come to, `[S]`."""
    searches: Sequence[bool]
    """Whether each of the texts is a beam's, `[S]`."""

    def before(self, entry: int, row: int) -> NDArray[np.int32]:
        """Returns the tokens before the draw of an entry."""
        return self.token_ids[row, : self.ends[entry]]


@dataclass(slots=True)
class ResampleBuilder:
    """The rows of a step that are drawn again, as they are found."""

    masks: dict[int, Bits] = field(default_factory=dict)
    logits: dict[int, Logits] = field(default_factory=dict)
    mirostat_mus: dict[int, float] = field(default_factory=dict)

    def build(self, *, is_last: bool) -> Resample | None:
        """Returns what is drawn again; the draws are looked at once more unless `is_last`."""
        if not self.masks:
            return None
        logits = places = mus = None
        if self.logits:
            order = {entry: place for place, entry in enumerate(self.logits)}
            places = np.array([order.get(entry, -1) for entry in self.masks], np.int32)
            logits = np.stack(list(self.logits.values()))
        if self.mirostat_mus:
            bounds = [self.mirostat_mus.get(entry, np.nan) for entry in self.masks]
            mus = np.array(bounds, np.float32)
        return Resample(
            np.array(list(self.masks), np.int32),
            np.stack(list(self.masks.values())),
            logits,
            places,
            mirostat_mus=mus,
            is_last=is_last,
        )


class SampleVerifier:
    """The draws of one step that are looked at. A `batch.Verify`."""

    def __init__(
        self,
        draws: Mapping[int, SampleToVerify],
        grammars: GrammarMatchers,
        processors: LogitsProcessors,
        texts: Texts,
        in_turn: Sequence[SequentialSampling] = (),
    ) -> None:
        """Takes the draws by their entries among the sampled rows."""
        self._draws = draws
        self._grammars = grammars
        self._processors = processors
        self._texts = texts
        self._faults: dict[int, str] = {}
        self._in_turn = list(in_turn)
        self._is_first = True
        """Whether the draws are looked at for the first time."""
        self._changed: dict[int, Logits] = {}
        """Logits of rows as processors have changed them."""
        self._resampled: list[int] = []
        """Draws that are looked at once more, whether their texts can still be completed."""

    def __contains__(self, entry: int) -> bool:
        """Returns whether an entry's mask is not wanted before the step."""
        return entry in self._draws

    def late(self, num_samples: int) -> NDArray[np.bool_] | None:
        """Returns which of the sampled rows are drawn late, `[S]`; None where none is."""
        late = [entry for entry, draw in self._draws.items() if draw.is_deferred]
        return _marked(late, num_samples)

    def uncut(self, num_samples: int) -> NDArray[np.bool_] | None:
        """Returns which of the sampled rows are drawn without cuts, `[S]`; None where none is."""
        uncut = [entry for entry, draw in self._draws.items() if draw.skips_cutoffs]
        return _marked(uncut, num_samples)

    def fault(self, entry: int) -> str:
        """Returns why a draw could not be made; "" where nothing failed here."""
        return self._faults.get(entry, "")

    def __call__(self, samples: SampleResult, kept: SampledLogits) -> Resample | None:
        """Sets draws that are not legal to the next that are; returns rows that are drawn again."""
        resamples = ResampleBuilder()
        to_close, self._resampled = self._resampled, []
        if self._is_first:
            self._changed.clear()
            self._look(samples, kept, resamples)
            to_close = [entry for entry in self._draws if self._may_close(entry)]
        for entry in to_close:
            if entry in resamples.masks:
                self._resampled.append(entry)
            elif not samples.failed[entry]:
                self._close(entry, samples, resamples)
        self._in_turn = [draws for draws in self._in_turn if self._go_on(draws, samples, resamples)]
        self._is_first = not (self._resampled or self._in_turn)
        return resamples.build(is_last=self._is_first)

    def _go_on(
        self, draws: SequentialSampling, samples: SampleResult, resamples: ResampleBuilder
    ) -> bool:
        """Moves a row with mirostat on to its next draw, once the current one has been made;
        returns whether more of its draws are to come.
        """
        if draws.entry not in resamples.masks:
            if not draws.go_on(samples):
                return False
            resamples.masks[draws.entry] = draws.mask
            if self._may_close(draws.entry):
                self._resampled.append(draws.entry)
        resamples.mirostat_mus[draws.entry] = draws.mu
        if draws.entry in self._changed:
            resamples.logits[draws.entry] = self._changed[draws.entry]
        return True

    def _look(self, samples: SampleResult, kept: SampledLogits, resamples: ResampleBuilder) -> None:
        """Finds what is wrong with the draws."""
        token_ids, failed = samples.token_ids.tolist(), samples.failed.tolist()
        witnesses = [] if samples.witnesses is None else samples.witnesses.tolist()
        wrong, to_mask = [], []
        for entry, draw in self._draws.items():
            if draw.is_search:
                self._search(entry, draw, samples, kept.logits(entry))
            elif draw.processors:
                self._process(entry, draw, samples, kept, resamples)
            elif draw.is_deferred or failed[entry]:
                to_mask.append(entry)
            elif draw.skips_cutoffs:
                holds = self._takes_cut(draw, witnesses[entry])
                if not (holds or self._takes_only(entry, draw, samples, resamples)):
                    to_mask.append(entry)
            elif not (
                self._takes(draw, token_ids[entry])
                or self._takes_only(entry, draw, samples, resamples)
            ):
                wrong.append(entry)
        if wrong:
            to_mask += self._replace(wrong, samples, kept, resamples)
        if to_mask:
            self._mask_all(to_mask, resamples)

    def _search(
        self, entry: int, draw: SampleToVerify, samples: SampleResult, logits: Logits
    ) -> None:
        """Gives a beam the logprobs of its best legal tokens."""
        if samples.failed[entry]:
            return
        legal = unpacked_mask(self._mask(draw), len(logits))
        samples.failed[entry] = not legal.any()
        write_best_legal(samples, entry, logits, legal)

    def _may_close(self, entry: int) -> bool:
        """Returns whether a draw comes near the end of its text's length."""
        draw = self._draws.get(entry)
        if draw is None or not draw.closes:
            return False
        num_left = self._texts.max_num_tokens[entry] - int(self._texts.ends[entry])
        return num_left <= CLOSE_TOKENS

    def _close(self, entry: int, samples: SampleResult, resamples: ResampleBuilder) -> None:
        """Has a draw give way to the short way to the end, where its text could not be completed
        behind it.
        """
        draw, num_tokens = self._draws[entry], int(self._texts.ends[entry])
        place = TextPosition(draw.row, num_tokens, draw.num_drafts)
        num_left = self._texts.max_num_tokens[entry] - num_tokens
        drawn = int(samples.token_ids[entry])
        if self._grammars.closes_after(place, drawn, num_left - 1):
            return
        way = self._grammars.closing(place, num_left)
        if way and way[0] != drawn:
            self._set(entry, way[0], samples, resamples)

    def _set(
        self, entry: int, token_id: int, samples: SampleResult, resamples: ResampleBuilder
    ) -> None:
        """Sets a draw's token; where logprobs are wanted, the draw that tells them is made."""
        if samples.logprobs is None:
            samples.token_ids[entry] = token_id
        else:
            resamples.masks[entry] = self._grammars.mask_of(token_id)

    def _replace(
        self,
        wrong: Sequence[int],
        samples: SampleResult,
        kept: SampledLogits,
        resamples: ResampleBuilder,
    ) -> list[int]:
        """Takes the first legal candidate of each draw; returns the draws that have none."""
        left = []
        candidates = kept.candidates(np.array(wrong, np.int32)).tolist()
        for entry, ids in zip(wrong, candidates, strict=True):
            draw = self._draws[entry]
            token_id = next((i for i in ids if i >= 0 and self._takes(draw, i)), None)
            if token_id is None:
                left.append(entry)
            else:
                self._set(entry, token_id, samples, resamples)
        return left

    def _mask_all(self, entries: Sequence[int], resamples: ResampleBuilder) -> None:
        """Has draws made under the masks of their grammars, which are made together."""
        draws = [self._draws[entry] for entry in entries]
        self._grammars.make_masks([draw.row for draw in draws if not draw.num_drafts])
        resamples.masks |= {
            entry: self._mask(draw) for entry, draw in zip(entries, draws, strict=True)
        }

    def _process(
        self,
        entry: int,
        draw: SampleToVerify,
        samples: SampleResult,
        kept: SampledLogits,
        resamples: ResampleBuilder,
    ) -> None:
        """Has a row drawn from what its processors make of its logits."""
        logits = kept.logits(entry)
        if np.isnan(logits).any():
            return  # the draw has failed, and says so
        try:
            changed = self._processors.apply(
                draw.processors, self._texts.before(entry, draw.row), logits
            )
        except ProcessorFault as error:
            self._faults[entry] = str(error)
            samples.failed[entry] = True
            return
        self._changed[entry] = resamples.logits[entry] = changed
        resamples.masks[entry] = self._mask(draw)

    def _takes_only(
        self, entry: int, draw: SampleToVerify, samples: SampleResult, resamples: ResampleBuilder
    ) -> bool:
        """Sets a draw to the one token that its grammar allows; returns whether there is one."""
        if draw.num_drafts or not draw.is_free:
            return False
        token_id = self._grammars.only_token(draw.row)
        if token_id is None or not self._takes(draw, token_id):
            return False
        self._set(entry, token_id, samples, resamples)
        return True

    def _takes_cut(self, draw: SampleToVerify, witnesses: Sequence[int]) -> bool:
        """Returns whether a token drawn without cuts is the masked draw with them, as far as its
        witnesses show; -1 stands behind the last.
        """
        drawn, *others = witnesses
        for token_id in others:
            if token_id < 0:
                break
            if not self._grammars.allows(draw.row, token_id, num_drafts=draw.num_drafts):
                return False
        return drawn >= 0 and self._takes(draw, drawn)

    def _takes(self, draw: SampleToVerify, token_id: int) -> bool:
        """Returns whether a token is legal; a row's own matcher takes it in at once, where nothing
        else is to be asked of it before.
        """
        if draw.num_drafts or draw.closes:
            return self._grammars.allows(draw.row, token_id, num_drafts=draw.num_drafts)
        return self._grammars.try_accept(draw.row, token_id)

    def _mask(self, draw: SampleToVerify) -> Bits:
        legal = self._grammars.mask_or_none(draw.row, num_drafts=draw.num_drafts)
        return legal if draw.allowed is None else legal & draw.allowed


def _marked(entries: Sequence[int], num_samples: int) -> NDArray[np.bool_] | None:
    """Returns `[S]` with some entries true; None where there are none."""
    if not entries:
        return None
    found = np.zeros(num_samples, np.bool_)
    found[entries] = True
    return found
