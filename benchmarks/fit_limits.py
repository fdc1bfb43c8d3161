"""Serves a model without options under limits of memory, and looks for out-of-memory kills.

    python benchmarks/fit_limits.py smollm2 --cgroup /sys/fs/cgroup/memory --runs 1000 \\
        --results FILE.jsonl --minutes 60

Each run starts `octavo serve MODEL` in a memory cgroup with a random limit, sends several long
requests at once, and prints a JSON line: the limit, the predicted and the largest use of memory,
the options that were chosen, and how the server and the requests ended. `ended` is "served", "does
not fit", "killed" or "failed". Lines also go to `--results`; runs that are there already are not
repeated, and none is started after `--minutes`, so that the same command continues where it was
stopped. The last line counts how the runs ended. Needs the right to make groups below `--cgroup`.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from memory_group import MemoryGroup

from octavo.api.errors import InsufficientMemory
from octavo.config.sizes import parse_bytes
from octavo.wiring.fitting.fit import fit_to_memory

START_S = 300.0
REQUESTS = 8
PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 16


class Server:
    """`octavo serve` in a group; `lines` are what it has printed."""

    def __init__(self, group: MemoryGroup, model: str) -> None:
        serve = [sys.executable, "-m", "octavo.cli.main", "serve", model, "--port=0"]
        self.lines: list[str] = []
        self.process = subprocess.Popen(group.join(serve), stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.lines.append(line.rstrip())

    def wait(self) -> str | None:
        """Waits until it serves; returns its URL, or None if it has ended."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            for line in list(self.lines):
                if found := re.match(r"serving .* on (http\S+)", line):
                    return found[1]
            time.sleep(0.1)
        return None

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


def ask(url: str, number: int) -> int:
    """Sends a long prompt; returns the HTTP status, 0 if the server broke the connection."""
    prompt = [300 + number, *(1000 + (number * 7919 + i) % 4000 for i in range(PROMPT_TOKENS))]
    body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=START_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def predicted(model: str, limit: int) -> tuple[int, dict[str, object]] | None:
    """Returns the predicted bytes and the options that are chosen; None if nothing fits."""
    try:
        fit = fit_to_memory({"model": model}, limit)
    except InsufficientMemory:
        return None
    assert fit is not None, "the native backend knows its memory"
    return fit.predicted_bytes, fit.options


def run(model: str, limit: int, cgroup: Path) -> dict[str, object]:
    """Serves a model under a limit and returns what happened."""
    plan = predicted(model, limit)
    with MemoryGroup(cgroup, limit) as group:
        server = Server(group, model)
        url, statuses = server.wait(), []
        if url is not None:
            with ThreadPoolExecutor(REQUESTS) as pool:
                statuses = list(pool.map(ask, [url] * REQUESTS, range(REQUESTS)))
        code = server.stop()
        kills, peak = group.num_kills, group.peak_bytes
    refused = any("does not fit" in line or "not enough memory" in line for line in server.lines)
    ended = "killed" if kills else "served" if url else "does not fit" if refused else "failed"
    return {
        "limit": limit,
        "ended": ended,
        "kills": kills,
        "code": code,
        "statuses": statuses,
        "peak_bytes": peak,
        "predicted_bytes": plan and plan[0],
        "options": plan and {key: str(value) for key, value in plan[1].items()},
        "last": server.lines[-1:] if ended == "failed" else [],
    }


def read(results: Path | None) -> list[dict[str, object]]:
    if results is None or not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def measure(args: argparse.Namespace) -> None:
    started = time.monotonic()
    least, most = (parse_bytes(text, name="limit") for text in (args.least, args.most))
    draw = random.Random(args.seed)
    limits = [int(least * (most / least) ** draw.random()) for _ in range(args.runs)]
    rows = read(args.results)
    if [row["limit"] for row in rows] != limits[: len(rows)]:
        raise SystemExit(f"--results: {args.results} has runs with other limits or another seed")
    for limit in limits[len(rows) :]:
        if time.monotonic() - started > 60 * args.minutes:
            print("stopped: the same command continues from here")
            break
        row = run(args.model, limit, args.cgroup)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.results is not None:
            with args.results.open("a") as file:
                print(json.dumps(row), file=file)
    statuses = Counter(status for row in rows for status in row["statuses"])
    print(json.dumps({"runs": len(rows), **Counter(row["ended"] for row in rows)}))
    print(json.dumps({"statuses": statuses}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--cgroup", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--least", default="384MiB")
    parser.add_argument("--most", default="2GiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="file of runs, to continue from")
    parser.add_argument("--minutes", type=float, default=60)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
