"""Submit and come back later: POST /generate gives an id at once, GET /result/ID the state or the
result.
"""

import sys
import time

import httpx

with httpx.Client(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000") as http:
    job = (
        http.post("/generate", json={"prompt": "Once upon a time", "max_tokens": 24})
        .raise_for_status()
        .json()
    )
    while (report := http.get(f"/result/{job['request_id']}").raise_for_status().json())[
        "state"
    ] in ("waiting", "running"):
        time.sleep(0.05)
    print(report["state"], report["outputs"][0]["text"])
