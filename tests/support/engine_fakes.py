"""A deterministic pseudo-model: the next token is a hash of all tokens before it, read back through
block tables as a real one would.

`FakeExecutor` keeps "KV" as (block, offset) -> token, so that a wrong table, a missed copy or a
stale hit changes the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from octavo.api.sampling_params import SamplingParams
from octavo.config.cache_options import CacheOptions
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.core import EngineCore
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.kv_meter import KvMeter
from octavo.engine.protocol.kv_cache_spec import get_window_spec
from octavo.engine.protocol.kv_messages import BlockMove
from octavo.engine.protocol.original_context import ONE_CONTEXT, OriginalContext
from octavo.engine.protocol.outputs import EngineOutput
from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.protocol.step import (
    ResultKind,
    RowResult,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from octavo.engine.protocol.step_costs import UNMEASURED, StepCosts
from octavo.engine.scheduler.build import build_scheduler
from tests.support.fake_tiers import FakeTiers, tiers_of

VOCAB = 1000
BLOCK = 16


def pseudo_token(history: list[int], sample_index: int = 0) -> int:
    value = 17 + sample_index
    for position, token in enumerate(history):
        value = (value * 1_000_003 + (position + 1) * (token + 7)) % 2_147_483_647
    return value % VOCAB


NUM_LIKELY = 10
"""Number of tokens with a logprob in a beam search."""


def pseudo_logprobs(history: list[int]) -> TokenLogprobs:
    """Returns logprobs as a worker does: the best token, then all of the likely ones, the best
    first.
    """
    base = pseudo_token(history)
    ranked = sorted(
        (-0.05 - (base * (token + 3) % 89) / 40 - token / 1000, token)
        for token in range(NUM_LIKELY)
    )[::-1]
    ranked = [ranked[0], *ranked]
    return TokenLogprobs(
        [token for _, token in ranked],
        [logprob for logprob, _ in ranked],
        [1, *range(1, NUM_LIKELY + 1)],
    )


@dataclass
class FakeRow:
    tokens: list[int]
    num_prompt_tokens: int
    sample_index: int
    end_token_ids: frozenset[int] = frozenset()
    tables: list[list[int]] = field(default_factory=list)
    first_position: int = 0

    def key(self, place: int) -> int:
        """Returns what the KV of a token holds: keys behind other first positions are others."""
        return self.tokens[place] + self.first_position * VOCAB


class FakeExecutor:
    """An executor over the pseudo-model. `windows` holds for each group the keys that a query sees,
    None for all.
    """

    def __init__(
        self,
        num_groups: int = 1,
        *,
        windows: Sequence[int | None] | None = None,
        tiers: FakeTiers | None = None,
    ) -> None:
        self.windows = windows or [None] * num_groups
        self.kv: list[dict[tuple[int, int], int]] = [{} for _ in self.windows]
        self.host: list[dict[tuple[int, int], int]] = [{} for _ in self.windows]
        self.tiers = tiers or FakeTiers(len(self.windows), None)
        self.rows: dict[str, FakeRow] = {}
        self.plans: list[StepPlan] = []
        self.original = ONE_CONTEXT
        self.raise_on: set[str] = set()
        self.fail_on: dict[str, str] = {}
        self.step_s = 0.0
        """Seconds that a step reports."""
        self.progress = 0
        self.closed = False

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for end in plan.table_lengths:
            for table, num_blocks in zip(
                self.rows[end.request_id].tables if end.request_id in self.rows else [],
                end.num_blocks,
                strict=False,
            ):
                del table[num_blocks:]
        for request_id in plan.freed_rows:
            self.rows.pop(request_id, None)
        for new in plan.new_rows:
            tables, ends = [[] for _ in self.kv], frozenset(new.end_token_ids)
            self.rows[new.request_id] = FakeRow(
                list(new.token_ids),
                new.num_prompt_tokens,
                new.sample_index,
                ends,
                tables,
                new.first_position,
            )
        for move in plan.moves:
            self._move(move)
        if bad := self.raise_on & {row.request_id for row in plan.rows}:
            raise RuntimeError(f"no luck with {sorted(bad)}")
        # A step that fails as a whole fails before its connector plan is begun.
        for row in plan.rows:
            if row.start + row.num_tokens > len(self.rows[row.request_id].tokens):
                raise RuntimeError(f"the last token of {row.request_id} was never drawn")
        self.tiers.begin(plan.connector)
        results = [self.run_row(row) for row in plan.rows]
        return StepResult(plan.step, results, connector=self.tiers.report(), busy_s=self.step_s)

    def decode(self, plan: StepPlan) -> Generator[StepResult]:
        starts = {row.request_id: row.start for row in plan.rows}
        result = self.execute(plan)
        yield result
        for num_done in range(1, plan.num_steps):
            if any(map(self._ends, result.rows)):
                return
            further = [
                ScheduledRequest(name, start + num_done, 1, [], result_kind=ResultKind.SAMPLE)
                for name, start in starts.items()
            ]
            result = StepResult(plan.step, list(map(self.run_row, further)), busy_s=self.step_s)
            yield result

    def _ends(self, result: RowResult) -> bool:
        ends = self.rows[result.request_id].end_token_ids
        return result.failure is not None or any(token in ends for token in result.token_ids)

    def _move(self, move: BlockMove) -> None:
        kv, host, slots = self.kv[move.group], self.host[move.group], self.tiers.slots[move.group]
        if move.kind in ("save", "load"):
            self.tiers.check(move)
        places = {
            "copy": (kv, kv),
            "swap_out": (kv, host),
            "swap_in": (host, kv),
            "save": (kv, slots),
            "load": (slots, kv),
        }
        source, target = places[move.kind]
        for offset in range(BLOCK):
            if (move.source, offset) in source:
                target[move.target, offset] = source[move.source, offset]
            else:
                target.pop((move.target, offset), None)

    def run_row(self, row) -> RowResult:
        state = self.rows[row.request_id]
        for table, added in zip(state.tables, row.new_block_ids, strict=False):
            table += added
        for group, index, block_id in row.replaced_blocks:
            state.tables[group][index] = block_id
        # What beams have in common may be shorter again than they are.
        assert state.first_position >= self.original.first_position(len(state.tokens))
        if row.request_id in self.fail_on:
            return RowResult(row.request_id, failure=self.fail_on[row.request_id])
        for kv, table in zip(self.kv, state.tables, strict=True):
            for position in range(row.start, row.start + row.num_tokens):
                kv[table[position // BLOCK], position % BLOCK] = state.key(position)
        prompt_logprobs = None
        if row.num_prompt_logprobs is not None:
            targets = state.tokens[
                row.start + 1 : min(row.start + row.num_tokens + 1, state.num_prompt_tokens)
            ]
            prompt_logprobs = [TokenLogprobs([token], [-float(token)], [1]) for token in targets]
        if row.result_kind != ResultKind.SAMPLE:
            return RowResult(
                row.request_id, prompt_logprobs=prompt_logprobs, num_kept=row.num_tokens
            )
        end = row.start + row.num_tokens
        for kv, table, window in zip(self.kv, state.tables, self.windows, strict=True):
            first = 0 if window is None else max(0, row.start - window + 1)
            seen = [
                kv[table[position // BLOCK], position % BLOCK] for position in range(first, end)
            ]
            assert seen == [state.key(place) for place in range(first, end)], (
                "the KV blocks hold other tokens than the request"
            )
        if row.search_of:
            logprobs = pseudo_logprobs(state.tokens[:end])
            state.tokens.append(logprobs.token_ids[0])
            return RowResult(
                row.request_id,
                logprobs.token_ids[:1],
                [logprobs],
                prompt_logprobs,
                num_kept=row.num_tokens,
            )
        token = pseudo_token(state.tokens[:end], state.sample_index)
        state.tokens.append(token)
        return RowResult(
            row.request_id, [token], prompt_logprobs=prompt_logprobs, num_kept=row.num_tokens
        )

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class Later:
    """A step that is computed when its result is asked for. Implements `ports.Launched`."""

    executor: FakeExecutor
    plan: StepPlan

    def result(self) -> StepResult:
        return self.executor.execute(self.plan)


class LaunchingExecutor(FakeExecutor):
    """An executor that takes the next step before it has computed the one before. Only tokens that
    are `from_device` may be unknown when a plan is made.
    """

    def launch(self, plan: StepPlan) -> Later:
        known = {name: len(row.tokens) for name, row in self.rows.items()} | {
            new.request_id: len(new.token_ids) for new in plan.new_rows
        }
        for row in plan.rows:
            if row.request_id in known:
                assert row.from_device == (row.start + row.num_tokens > known[row.request_id])
                assert not row.from_device or row.num_tokens == 1
        return Later(self, plan)


def make_core(
    *,
    num_blocks: int = 64,
    num_groups: int = 1,
    windows: Sequence[int | None] | None = None,
    num_host_blocks: int = 0,
    max_model_len: int = 512,
    executor=None,
    clock: Callable[[], float] = lambda: 0.0,
    caching: bool = True,
    kv_cache: bool = True,
    kv_layout: str = "paged",
    budget: int = 64,
    max_num_seqs: int = 8,
    num_slots: int = 0,
    runs_ahead: bool = False,
    num_micro_batches: int = 1,
    costs: StepCosts = UNMEASURED,
    kv_meter: KvMeter | None = None,
    kv_events_config: str | None = None,
    original: OriginalContext = ONE_CONTEXT,
    **options,
) -> EngineCore:
    """Returns a core over the pseudo-model. `options` are the scheduler's; `windows` gives each
    group its own; `num_slots` connects the executor's tiers.
    """
    executor = executor or (
        LaunchingExecutor if runs_ahead or num_micro_batches > 1 else FakeExecutor
    )(num_groups, windows=windows)
    executor.original = original
    groups = [
        BlockGroup(num_blocks, get_window_spec(window), num_host_blocks)
        for window in windows or [None] * num_groups
    ]
    scheduler = build_scheduler(
        SchedulerOptions(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, **options),
        CacheOptions(
            enable_prefix_caching=caching,
            kv_cache=kv_cache,
            kv_layout=kv_layout,
            kv_events_config=kv_events_config,
        ),
        groups,
        block_size=BLOCK,
        max_model_len=max_model_len,
        tiers=tiers_of(len(groups), executor.tiers, num_slots) if num_slots else None,
        num_micro_batches=num_micro_batches,
        original=original,
    )
    return EngineCore(
        scheduler,
        executor,
        clock=clock,
        runs_ahead=runs_ahead,
        num_micro_batches=num_micro_batches,
        costs=costs,
        kv_meter=kv_meter,
    )


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int | None = 8,
    eos: tuple[int, ...] = (),
    **fields,
) -> EngineRequest:
    names = (
        "sample_index",
        "fork_of",
        "fork_tokens",
        "cache_salt",
        "priority",
        "tenant",
        "arrival_time",
        "output_token_ids",
    )
    own = {name: fields.pop(name) for name in names if name in fields}
    return EngineRequest(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, **fields),
        seed=1,
        eos_token_ids=list(eos),
        **own,
    )


def expected_tokens(prompt: list[int], count: int, sample_index: int = 0) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(pseudo_token(history, sample_index))
    return history[len(prompt) :]


def run_all(core: EngineCore, *, max_steps: int = 3000) -> dict[str, list[EngineOutput]]:
    """Steps until there is no work; returns all outputs by request."""
    found: dict[str, list[EngineOutput]] = {}
    for _ in range(max_steps):
        if not core.has_work:
            return found
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine does not come to an end")


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
