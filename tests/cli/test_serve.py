"""`octavo serve`'s messages at its start; the routes are tested in tests/server."""

import os
import subprocess
import sys

from tests.support.live_server import LiveServer
from tests.support.tiny_gguf import tiny_model, write_tiny_gguf
from tests.support.tiny_tokenizer import tiny_model_with_text

MODEL = str(tiny_model_with_text())


def test_a_server_open_to_all_without_a_key_warns():
    server = LiveServer(MODEL, "--host=0.0.0.0")
    assert server.stop() == 0
    assert server.lines[0].startswith(
        "warning: 0.0.0.0 is reachable from other machines without --api-key"
    )
    assert server.url.startswith("http://127.0.0.1:")


def test_a_server_open_to_all_with_a_key_does_not_warn():
    server = LiveServer(MODEL, "--host=0.0.0.0", key="secret")
    assert server.stop() == 0
    assert server.lines[0].startswith("loading ")
    assert "$OCTAVO_API_KEY" in server.lines[-1]


def test_strict_refuses_an_unknown_pre_tokenizer(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), tokens=96)
    path.write_bytes(path.read_bytes().replace(b"smollm", b"smolly"))
    command = [sys.executable, "-m", "octavo.cli.main", "serve", str(path), "--port=0"]
    for option in ("--strict", "--strict-files"):
        done = subprocess.run(
            [*command, option], check=False, stderr=subprocess.PIPE, text=True, timeout=60
        )
        assert done.returncode == 2
        assert "unknown pre-tokenizer 'smolly'" in done.stderr
        assert "the closest is 'smollm'\nhint: remove --strict-files" in done.stderr
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, timeout=60)
    assert "WARNING" in done.stderr and "using the 'default' pre-tokenizer" in done.stderr


def test_a_folder_called_octavo_beside_is_not_mistaken_for_the_package(tmp_path):
    """Both the server and the engine's own process import the right package."""
    (tmp_path / "octavo").mkdir()
    (tmp_path / "octavo" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    command = [
        sys.executable,
        "-P",
        "-m",
        "octavo.cli.main",
        "serve",
        MODEL,
        "--port=0",
        "--threads=1",
        "--max-model-len=64",
    ]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    server = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    said = []
    for line in server.stderr:
        said.append(line)
        if line.startswith("try: "):
            server.terminate()
    assert server.wait(20) == 0, said
