"""The Vercel AI SDK, in Node.js: generateText, streamText, a completion model, an error."""

import json
import subprocess
from pathlib import Path

from tests.clients.conftest import MODEL, QUESTION

SCRIPT = Path(__file__).parent / "node" / "ask.mjs"


def test_the_sdk_generates_and_streams(base_url, answer):
    command = ["node", str(SCRIPT), base_url, MODEL, QUESTION]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["whole"] == found["streamed"] == answer
    assert "Paris" in found["completed"] and found["usage"]["outputTokens"] <= 12
    assert found["refusal"].startswith("400 temperature: got 5")
