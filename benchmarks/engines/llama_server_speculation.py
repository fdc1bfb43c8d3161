"""llama.cpp's kinds of guesses on prompts of token ids, through its own `llama-server`, one stream,
greedy, the prompts cached.
"""

import json
import os
import statistics
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engines.servers import free_port, started

KINDS = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""Values of `--spec-type` that need no other model."""
CONTEXT = 4096


@dataclass(frozen=True)
class LlamaServer:
    """Binary of llama-server, and the GGUF files that it takes."""

    binary: str
    model: str
    draft: str | None

    def rows(
        self, prompts: dict[str, list[int]], num_tokens: int, num_rounds: int
    ) -> Iterator[dict[str, Any]]:
        """Yields a line for each kind and work: the median of the rounds."""
        kinds = [*KINDS, "draft-simple"] if self.draft else KINDS
        for kind in kinds:
            port = free_port()
            with started(self._command(kind, port), port) as url:
                for work, prompt in prompts.items():
                    _rate(url, prompt, 1)
                    rates = [_rate(url, prompt, num_tokens) for _ in range(num_rounds)]
                    yield {
                        "work": work,
                        "streams": 1,
                        "method": f"llama.cpp {kind}",
                        "tokens_per_s": round(statistics.median(rates), 1),
                        "range": [round(min(rates), 1), round(max(rates), 1)],
                    }

    def _command(self, kind: str, port: int) -> list[str]:
        command = [self.binary, "-m", self.model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["-np", "1", "-c", str(CONTEXT), "-t", str(len(os.sched_getaffinity(0)))]
        command += ["--spec-type", kind]
        return [*command, "-md", self.draft] if kind == "draft-simple" and self.draft else command


def _rate(url: str, prompt: list[int], num_tokens: int) -> float:
    """Returns the tokens/s of an answer."""
    body = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "cache_prompt": True}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=900) as response:
        answer = json.load(response)
    return int(answer["tokens_predicted"]) / (time.perf_counter() - began)
