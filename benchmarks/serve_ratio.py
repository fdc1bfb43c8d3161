"""The cost of HTTP: a server's streams beside LLM.generate on the same work, in turns.

    python benchmarks/serve_ratio.py --rounds 5 --options '{}' --options '{"num_scheduler_steps":
    1}'

For each set of options a server and an LLM are started, each in processes of its own; the client
runs in this one. Works are those of engines/work.py: single is one request (new tokens per second),
batch all at once (prompt and new tokens per second). Prefix caching is off. Prints a JSON line per
result and, last, for each work and set of options the median, least and greatest ratio of a round,
with the percentiles of the time between two tokens of a stream. `cpu_us_per_token` is processor
time for each new token, by process. Nothing else should run on the machine.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from compare import machine

from octavo import LLM, SamplingParams
from octavo.tools.bench.load import LoadTest, run_load
from octavo.tools.bench.percentiles import percentiles
from octavo.tools.bench.serve_figures import Outcome, first_token_s
from octavo.tools.bench.started_server import started_server
from octavo.tools.bench.traffic import make_prompt, make_synthetic

ENGINE_OPTIONS = {"enable_prefix_caching": False}
WARM_TOKENS = 8
PROCESSES = {"octavo.engine.clients.core_process": "core", "octavo.cli.main": "front"}


@dataclass(frozen=True)
class Work:
    name: str
    requests: int
    prompt: int
    output: int

    def rate(self, elapsed_s: float) -> float:
        """Returns tokens per second; of a single stream only the new ones count."""
        return (
            self.requests * (self.output + (self.prompt if self.name == "batch" else 0)) / elapsed_s
        )


@dataclass(frozen=True)
class Rivals:
    """A server and an LLM over the same engine."""

    options: str
    url: str
    llm: Connection

    def generate(self, work: Work) -> dict[str, Any]:
        self.llm.send(work)
        return {"tokens_per_second": round(work.rate(self.llm.recv()), 1)}

    def serve(self, work: Work) -> dict[str, Any]:
        before = processor_times()
        _, outcomes, elapsed_s = run_load(LoadTest(self.url, None, None, requests_of(work)))
        spent = {
            name: seconds - before.get(name, 0.0) for name, seconds in processor_times().items()
        }
        if failed := [outcome.error for outcome in outcomes if outcome.error]:
            raise SystemExit(f"{len(failed)} requests failed, the first: {failed[0]}")
        return {
            "tokens_per_second": round(work.rate(elapsed_s), 1),
            "time_to_first_token_ms": rounded(
                percentiles(
                    first_token_s(outcome.streamed) for outcome in outcomes if outcome.streamed
                )
            ),
            "inter_token_ms": rounded(percentiles(gaps_of(outcomes))),
            "gaps": gaps_of(outcomes),
            "cpu_us_per_token": {
                name: round(1e6 * seconds / (work.requests * work.output))
                for name, seconds in spent.items()
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--options",
        action="append",
        help="JSON of the engine's options; may be repeated; default {}",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    args = parser.parse_args()
    works = [
        Work("single", 1, args.prompt, args.output),
        Work("batch", args.requests, args.prompt, args.output),
    ]
    settings = {"requests": args.requests, "prompt": args.prompt, "output": args.output}
    print(json.dumps({"machine": machine(), "load": os.getloadavg(), **settings}), flush=True)
    with ExitStack() as stack:
        rivals = [
            stack.enter_context(started(args.model, options)) for options in args.options or ["{}"]
        ]
        measure(rivals, works, args.rounds)


def measure(rivals: list[Rivals], works: list[Work], rounds: int) -> None:
    rates: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    for round_number in range(rounds):
        for work in works:
            for rival in rivals:
                for way in ("generate", "serve"):
                    result = getattr(rival, way)(work)
                    rates[work.name, rival.options, way].append(result["tokens_per_second"])
                    gaps[work.name, rival.options] += result.pop("gaps", [])
                    row = {
                        "round": round_number,
                        "work": work.name,
                        "options": rival.options,
                        "way": way,
                    }
                    print(
                        json.dumps({**row, **result, "at": time.strftime("%H:%M:%S")}), flush=True
                    )
    for (work, options), seconds in gaps.items():
        generated, served = rates[work, options, "generate"], rates[work, options, "serve"]
        ratios = [ours / theirs for ours, theirs in zip(served, generated, strict=True)]
        summary = {
            "work": work,
            "options": options,
            "ratio": spread(ratios),
            "generate": spread(generated),
            "serve": spread(served),
        }
        print(json.dumps({**summary, "inter_token_ms": rounded(percentiles(seconds))}))


@contextmanager
def started(model: str, options: str) -> Iterator[Rivals]:
    """Starts a server and an LLM, and warms them up."""
    given = {"model": model, **ENGINE_OPTIONS, **json.loads(options)}
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=generate, args=(there, given), daemon=True
    )
    process.start()
    here.recv()
    with started_server(given) as url:
        yield Rivals(options, url, here)
    here.send(None)
    process.join()


def generate(orders: Connection, options: dict[str, Any]) -> None:
    """Answers each work with the seconds that it took; runs in a process of its own."""
    with LLM(**options, report=lambda text: None) as llm:
        run(llm, Work("batch", 2, WARM_TOKENS, WARM_TOKENS))
        orders.send(None)
        while (work := orders.recv()) is not None:
            orders.send(run(llm, work))


def run(llm: LLM, work: Work) -> float:
    params = SamplingParams(temperature=0, max_tokens=work.output, ignore_eos=True)
    prompts = [{"prompt_token_ids": make_prompt(request, 0)} for request in requests_of(work)]
    began = time.perf_counter()
    done = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - began
    assert sum(len(request.outputs[0].token_ids) for request in done) == work.requests * work.output
    return took


def requests_of(work: Work) -> list[Any]:
    return make_synthetic(num_requests=work.requests, input_len=work.prompt, output_len=work.output)


def gaps_of(outcomes: list[Outcome]) -> list[float]:
    """Returns the seconds between two tokens of a stream, of all streams."""
    return [
        later - earlier
        for outcome in outcomes
        if outcome.streamed
        for earlier, later in pairwise(outcome.streamed.token_times)
    ]


def processor_times() -> dict[str, float]:
    """Returns processor seconds of this process ("client") and, where /proc exists, of its servers,
    by name.
    """
    times = {"client": time.process_time()}
    ours = {os.getpid()}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            command, stat = (
                (folder / "cmdline").read_text(),
                (folder / "stat").read_text().rpartition(")")[2].split(),
            )
        except OSError:
            continue
        if int(stat[1]) not in ours:
            continue
        ours.add(int(folder.name))
        name = next((name for module, name in PROCESSES.items() if module in command), None)
        if name is not None:
            times[name] = times.get(name, 0.0) + sum(map(int, stat[11:13])) / os.sysconf(
                "SC_CLK_TCK"
            )
    return times


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


if __name__ == "__main__":
    main()
