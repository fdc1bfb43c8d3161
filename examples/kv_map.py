"""Watches the KV blocks of a server while it generates: one line per update, one column per kind.

Needs a server: `octavo serve smollm2`. A URL may be given.
"""

import json
import sys
import threading

import httpx

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
body = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
request = threading.Thread(
    target=httpx.post, args=(f"{url}/v1/completions",), kwargs={"json": body, "timeout": 60}
)
with httpx.stream("GET", f"{url}/v1/engine/events", timeout=60) as events:
    request.start()
    for line in events.iter_lines():
        if not line.startswith("data: "):
            continue
        view = json.loads(line.removeprefix("data: "))
        counts = view["groups"][0]["counts"]
        print(view["queue"]["running"], "running;", counts["held"], "blocks held,", end=" ")
        print(counts["shared"], "shared,", counts["cached"], "cached,", counts["free"], "free")
        if view["type"] == "update" and not request.is_alive():
            break
request.join()
