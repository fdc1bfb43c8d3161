"""benchmarks/serve_load.py: the same traffic against two servers in turns, with a tiny model, and
the peers' command lines.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engines.servers import Needs, Server
from tests.support.tiny_tokenizer import tiny_model_with_text

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_load.py"
SMALL = ("--input-len=8-16", "--output-len=2-4", "--fewest=3", "--seconds=0.1", "--clients=2")
LOADS = ("--rate=40", "--rate=80", "--enough=0")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_two_servers_get_the_same_traffic_in_turns(tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 300, "output_length": 90} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    options = {"backend": "reference", "max_model_len": 64, "kv_cache_memory_bytes": "1MiB"}
    model = tiny_model_with_text()
    given = json.dumps(options)
    servers = [f"--server=octavo|{form}|{model}|{given}" for form in ("one", "two")]
    kinds = [f"--traffic={kind}" for kind in ("poisson", "bursty", "trace")]
    ended = run(*servers, *SMALL, *LOADS, *kinds, f"--trace={trace}")
    assert ended.returncode == 0, ended.stderr
    head, *lines = map(json.loads, ended.stdout.splitlines())
    assert head["rates"] == [40, 80] and head["good_ms"] == {"ttft": 1000, "itl": 100}
    loads, summaries = lines[:12], lines[12:]
    assert [row["format"] for row in loads] == ["one"] * 6 + ["two"] * 6
    sizes = [(row["traffic"], row["rate"], row["requests"]) for row in loads]
    assert sizes[:6] == sizes[6:] and {kind for kind, _, _ in sizes} == {
        "poisson",
        "bursty",
        "trace",
    }
    for row in loads:
        assert row["completed"] == row["requests"] and row["failed"] == 0 and row["errors"] == []
        assert 0 <= row["good"]["share"] <= 1 and row["inter_token_ms"]["p99"] > 0
    assert len(summaries) == 6
    for one in summaries:
        assert one["good_requests_per_s"]["median"] == max(
            row["good"]["requests_per_s"]
            for row in loads
            if (row["traffic"], row["format"]) == (one["traffic"], one["format"])
        )


def test_a_scale_that_cuts_blocks_is_refused_in_a_sentence(tmp_path: Path):
    """The message has no traceback, and names a scale that would do."""
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(row))
    ended = run("--server=at|x|http://127.0.0.1:9|{}", f"--trace={trace}", "--scale=1/64")
    assert ended.returncode == 1 and "hint: use --scale 1/32" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_peers_get_room_for_every_client():
    needs = Needs(clients=16, context=2304)
    llama = Server.parse('llamacpp|Q4_1|m.gguf|{"binary": "/b/llama-server", "args": ["-t", 2]}')
    command = llama.command(needs, 8001)
    assert command[:3] == ["/b/llama-server", "-m", "m.gguf"] and command[-2:] == ["-t", "2"]
    assert command[command.index("-c") + 1] == str(16 * 2304)
    vllm = Server.parse("vllm|bf16|folder|{}|/v/python").command(needs, 8002)
    assert vllm[0] == "/v/python" and "--max-num-seqs" in vllm and "--port=8002" in vllm


def test_a_server_that_ends_at_once_is_quoted():
    failing = json.dumps({"binary": "false"})
    ended = run(f"--server=llamacpp|Q4|x.gguf|{failing}", *SMALL)
    assert ended.returncode == 1 and "did not serve" in ended.stderr
    missing = json.dumps({"binary": "/nowhere/llama-server"})
    assert "does not start" in run(f"--server=llamacpp|Q4|x|{missing}", *SMALL).stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--server=other|x|y|{}", "expected NAME|FORMAT|MODEL|OPTIONS"),
        ("--server=octavo|x|y|[1]", "expected an object"),
        ("--server=octavo|x|y|{", "OPTIONS of"),
        ("--rate=0", "expected a number above 0"),
        ("--input-len=9-3", "expected LOW-HIGH"),
        ("--clients=0", "expected a whole number above 0"),
    ],
)
def test_a_wrong_argument_is_refused_before_a_server_starts(argument: str, message: str):
    ended = run(argument)
    assert ended.returncode == 2 and message in ended.stderr
