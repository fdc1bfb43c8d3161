"""Routing policies on the Mooncake conversation trace: what share of the prompts' tokens is found
in a cache, and how evenly the work is spread; and what a decision costs.

    python -m benchmarks.route [--engines 4] [--trace FILE] [--load 0.8]

The engines are simulated: each computes its queue in order at one rate, chosen so that the work of
one shared cache loads them by `--load`, and its cache forgets nothing. The router is the one that
`octavo serve` runs.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.engine.protocol.block_hashes import BlockHashing
from octavo.engine.protocol.cached_hashes import CachedHashes
from octavo.engine.routing.job import RoutingJob
from octavo.engine.routing.policies import ROUTING_POLICIES, RoutingPolicyName
from octavo.engine.routing.router import Router
from octavo.engine.routing.target import Target

TRACE = Path(__file__).parent / "data" / "mooncake_conversation.jsonl"
TRACE_BLOCK = 512
"""Tokens of a block of the trace."""
ENGINE_BLOCK = 16
NUM_KNOWN = 100_000
"""Blocks that the router knows while its decisions are timed."""
PROMPT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    arrives_s: float
    job: RoutingJob


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hits and balance of a policy on a trace."""

    hit_share: float
    """Share of the prompts' tokens that were cached where the request was sent."""
    imbalance: float
    """Work of the busiest engine over the mean."""


def read_trace(path: Path) -> list[TraceRow]:
    """Reads a trace in Mooncake's form; ValueError names the line that is not one."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            names = [int(name).to_bytes(8, "little") for name in row["hash_ids"]]
            session = b"".join(names[:2])
            job = RoutingJob(int(row["input_length"]), names, TRACE_BLOCK, session)
            rows.append(TraceRow(row["timestamp"] / 1000, job))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path}:{number}: not a line of a trace: {error}") from error
    return rows


def shared_hit_share(rows: Sequence[TraceRow]) -> float:
    """Returns the share of tokens that one cache for all requests would find."""
    cache, hits = CachedHashes(), 0
    for row in rows:
        hits += row.job.num_cached(cache.num_known(row.job.names))
        cache.add(row.job.names)
    return hits / sum(row.job.num_tokens for row in rows)


def simulate(
    rows: Sequence[TraceRow], policy: RoutingPolicyName, num_engines: int, *, load: float
) -> Outcome:
    """Routes a trace to simulated engines that compute prompts one after the other."""
    total = sum(row.job.num_tokens for row in rows)
    work = total * (1 - shared_hit_share(rows))
    rate = work / (rows[-1].arrives_s - rows[0].arrives_s) / num_engines / load
    targets = [Target(f"engine {index}") for index in range(num_engines)]
    router = Router(ROUTING_POLICIES[policy](), targets)
    free_at = [0.0] * num_engines
    ends: list[tuple[float, str]] = []
    hits = 0
    for number, row in enumerate(rows):
        while ends and ends[0][0] <= row.arrives_s:
            end, name = heapq.heappop(ends)
            router.record_tokens(name, 1, end)
            router.ended(name)
        index = router.choose(row.job, range(num_engines), row.arrives_s)
        num_cached = router.sent(str(number), row.job, index, row.arrives_s)
        hits += num_cached
        starts = max(free_at[index], row.arrives_s)
        free_at[index] = starts + (row.job.num_tokens - num_cached) / rate
        heapq.heappush(ends, (free_at[index], str(number)))
    sent = [target.sent_tokens for target in targets]
    return Outcome(hits / total, max(sent) / (sum(sent) / num_engines))


def decision_ms(num_engines: int, num_decisions: int = 300) -> list[float]:
    """Times decisions on prompts of 8,192 tokens, with 100,000 known blocks; milliseconds of
    processor time, sorted. Naming the prompt's blocks is part of each; tokenization is not.
    """
    draw = random.Random(0)
    most = NUM_KNOWN // num_engines
    targets = [Target(f"engine {index}", CachedHashes(most)) for index in range(num_engines)]
    router = Router(ROUTING_POLICIES["kv"](), targets)
    for index in range(NUM_KNOWN):
        targets[index % num_engines].cached.add([draw.randbytes(16)])
    prompt = [draw.randrange(50_000) for _ in range(PROMPT_TOKENS)]
    times = []
    for number in range(num_decisions):
        tail = draw.randrange(PROMPT_TOKENS)
        tokens = prompt[:tail] + [number] * (PROMPT_TOKENS - tail)
        began = time.thread_time()
        job = RoutingJob(PROMPT_TOKENS, BlockHashing().digests(tokens, ENGINE_BLOCK), ENGINE_BLOCK)
        router.sent(str(number), job, router.choose(job, range(num_engines), 0.0), 0.0)
        times.append((time.thread_time() - began) * 1000)
    return sorted(times)


def main() -> None:
    """Prints the figures of every policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--load", type=float, default=0.8)
    given = parser.parse_args()
    rows = read_trace(given.trace)
    shared = shared_hit_share(rows)
    print(f"{len(rows)} requests, {given.engines} engines; one shared cache finds {shared:.2%}")
    for policy in ROUTING_POLICIES:
        got = simulate(rows, policy, given.engines, load=given.load)
        print(
            f"{policy:12} hits {got.hit_share:.2%}, {got.hit_share / shared:.1%} of one cache's;"
            f" busiest {got.imbalance:.3f} times the mean"
        )
    times = decision_ms(given.engines)
    median, slow = times[len(times) // 2], times[len(times) * 99 // 100]
    print(
        f"decision on {PROMPT_TOKENS} tokens, {NUM_KNOWN} known blocks: median {median:.2f} ms of"
        f" processor time, p99 {slow:.2f} ms"
    )


if __name__ == "__main__":
    main()
