"""llama.cpp on the standard work, through its llama-server. MODEL is a GGUF file; options: JSON of
{"binary": PATH of llama-server, "args": [more of its flags]}. Any Python runs this file.
"""

import json
import os
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from work import arguments, measure

READY_S = 300.0

model, requests, prompt, output, text = arguments()
options = json.loads(text)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answer(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=900) as response:
        return json.load(response)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end:
        try:
            answer(f"{url}/health")
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"{options['binary']} did not serve {model}")


def run(prompts: list[list[int]], num_output: int) -> int:
    """Asks for all prompts at once; the server counts the tokens."""

    def one(ids: list[int]) -> int:
        body = {"prompt": ids, "n_predict": num_output, "temperature": 0, "ignore_eos": True}
        return int(answer(f"{url}/completion", body | {"cache_prompt": False})["tokens_predicted"])

    with ThreadPoolExecutor(len(prompts)) as pool:
        return sum(pool.map(one, prompts))


port = free_port()
url = f"http://127.0.0.1:{port}"
command = [options["binary"], "-m", model, "--host", "127.0.0.1", "--port", str(port)]
command += ["-np", str(requests), "-c", str(requests * (prompt + output + 16))]
command += ["-t", str(os.cpu_count()), "-b", "2048", "-ub", "512", *options.get("args", [])]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    wait_until_ready(server, url)
    measure(run, requests, prompt, output)
finally:
    server.terminate()
    server.wait()
