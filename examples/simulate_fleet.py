"""Simulate two machines: which layout serves the most requests in time?

Records an engine, which measures the cost of its steps, and writes a trace of requests. Then
`octavo plan --trace` runs real schedulers and the real router on simulated clocks, at rising rates.

    $ python simulate_fleet.py
    simulated: 40 requests of trace.jsonl, ttft=5660ms,tpot=93ms, met by 90%; 2 machines, ...
    2 x both                     engine.jsonl                  1.11 requests/s, 0.553 a machine
    1 x prefill + 1 x decode     engine.jsonl                 0.777 requests/s, 0.389 a machine
    1 x both in 2 stages         engine.jsonl                 0.609 requests/s, 0.304 a machine

Optional argument: the model.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from octavo import LLM, SamplingParams

folder = Path(tempfile.mkdtemp())
recording, trace = folder / "engine.jsonl", folder / "trace.jsonl"
params = SamplingParams(max_tokens=24, ignore_eos=True)

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2", record=str(recording)) as llm:
    for num_requests in (8, 4, 1):  # the costs of batches and of a single request
        prompts = [
            f"{number} of {num_requests} " + "stars. " * 90 for number in range(num_requests)
        ]
        *_, last = llm.generate(prompts, params)

with trace.open("w") as file:  # Mooncake's format; no request shares a prefix
    for number in range(40):
        row = {"timestamp": 500 * number, "input_length": 180, "output_length": 24}
        file.write(json.dumps(row | {"hash_ids": [number]}) + "\n")

times = last.metrics
seconds_per_token = (times.last_token_ts - times.first_token_ts) / 23
ttft_ms, tpot_ms = 4000 * times.first_token_latency, 4000 * seconds_per_token
slo = f"ttft={ttft_ms:.0f}ms,tpot={tpot_ms:.0f}ms"  # at most 4x as slow as a single request
command = ["octavo", "plan", "--trace", trace, "--costs", recording, "--slo", slo]
subprocess.run([*command, "--machines", "2"], check=True)
