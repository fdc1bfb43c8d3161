"""Watch the KV blocks of a server while it generates.

    $ octavo serve smollm2
    $ python kv_map.py
    1 running; blocks: 1 held, 0 cached, 28824 free
    ...
    1 running; blocks: 4 held, 0 cached, 28821 free
    0 running; blocks: 0 held, 3 cached, 28822 free

Optional argument: the URL of the server.
"""

import json
import sys
import threading

import httpx

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def generate():
    body = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


request = threading.Thread(target=generate)
with httpx.stream("GET", f"{url}/v1/engine/events", timeout=60) as events:
    request.start()
    for line in events.iter_lines():
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        running, blocks = event["queue"]["running"], event["groups"][0]["counts"]
        print(
            f"{running} running; blocks: {blocks['held']} held, {blocks['cached']} cached,", end=""
        )
        print(f" {blocks['free']} free")
        if event["type"] == "update" and not request.is_alive():
            break
request.join()
