"""Submit a request and fetch the result later: POST /generate returns an id at once, GET
/result/ID the state or the result.

    $ octavo serve smollm2
    $ python jobs.py
    waiting
    finished: The best way to learn to cook is to start with the basics.

Optional argument: the URL of the server.
"""

import sys
import time

import httpx

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
body = {"prompt": "The best way to learn to cook is", "max_tokens": 40, "temperature": 0}

with httpx.Client(base_url=url) as http:
    job = http.post("/generate", json=body).raise_for_status().json()
    print(job["state"])
    while job["state"] in ("waiting", "running"):
        time.sleep(0.05)
        job = http.get(f"/result/{job['request_id']}").raise_for_status().json()
    print(f"{job['state']}: {body['prompt']}{job['outputs'][0]['text']}")
