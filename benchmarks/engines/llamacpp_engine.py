"""llama.cpp on the standard work, through its own llama-batched-bench, which counts its tokens
itself. MODEL is a GGUF file; options: JSON of {"binary": PATH of llama-batched-bench, "arguments":
[more of its flags]}. Any Python runs this file."""

import json
import os
import re
import subprocess

from work import arguments, report, works

COLUMNS = (
    "prompt",
    "generated",
    "streams",
    "kv",
    "prompt_s",
    "prompt_rate",
    "generated_s",
    "generated_rate",
    "seconds",
    "rate",
)

model, requests, prompt, output, text = arguments()
options = json.loads(text)
streams = [1] if {"single", "decode"} & {*works()} else []
streams += [requests] if {"batch", "prefill"} & {*works()} else []
command = [
    options["binary"],
    "-m",
    model,
    "-c",
    str(requests * (prompt + output)),
    "-b",
    "2048",
    "-ub",
    "512",
]
command += [
    "-npp",
    str(prompt),
    "-ntg",
    str(output),
    "-npl",
    ",".join(map(str, streams)),
    "-t",
    str(os.cpu_count()),
    *options.get("arguments", []),
]
done = subprocess.run(command, check=False, capture_output=True, text=True)
rows = [
    re.findall(r"[\d.]+", line) for line in done.stdout.splitlines() if re.match(r"^\|\s+\d", line)
]
if done.returncode or len(rows) != len(streams):
    raise SystemExit(f"{options['binary']} ended with {done.returncode}:\n{done.stderr[-2000:]}")
first, *_, last = [dict(zip(COLUMNS, map(float, row), strict=True)) for row in [rows[0], *rows]]
rates = {
    "single": output / first["seconds"],
    "decode": first["generated_rate"],
    "batch": last["rate"],
    "prefill": last["prompt_rate"],
}
for work in works():
    report(work, rates[work])
