"""Sessions over HTTP and in `octavo chat`: what one server saves, the next one continues."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from tests.support.live_server import READABLE, LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

BODY = {name: value for name, value in READABLE.items() if name != "extra_body"}
TALK = [{"role": "user", "content": "Tell me a long story about a fox and the moon."}]


def start(folder: Path, *flags: str) -> LiveServer:
    model = str(tiny_model_with_text())
    return LiveServer(model, f"--slot-save-path={folder}", "--served-model-name=tiny", *flags)


def ask(http, messages) -> tuple[str, int]:
    """Returns the response, and the number of cached prompt tokens."""
    body = {**BODY, "messages": messages, "temperature": 0, "max_tokens": 6}
    answer = http.post("/v1/chat/completions", json=body).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], cached


def test_sessions_and_slots_outlive_a_server(tmp_path, octavo, monkeypatch):
    first = start(tmp_path)
    with first.http() as http:
        text, _ = ask(http, TALK)
        messages = [*TALK, {"role": "assistant", "content": text}]
        save = {"action": "save", "name": "story", "messages": messages}
        saved = http.post("/v1/sessions", json=save).json()
        assert saved["tokens"] >= 32 and saved["bytes"] > 0 and saved["model"] == "tiny"
        again = [*messages, {"role": "user", "content": "Go on."}]
        expected, _ = ask(http, again)
        slot = http.post("/slots/0?action=save", json={"filename": "slot.bin"}).json()
        assert slot["n_saved"] > saved["tokens"] and slot["timings"]["save_ms"] > 0
        assert http.post("/slots/0?action=erase", json={}).json()["n_erased"] > slot["n_saved"]
        error = http.post("/slots/0?action=save", json={"filename": "slot.bin"})
        assert error.status_code == 404 and "no request has finished" in error.text
        for path, body, message in (
            ("/slots/1?action=save", {"filename": "a"}, "slot: got 1, expected 0"),
            ("/slots/0?action=load", {"filename": "a"}, "action: got 'load', expected 'save'"),
            ("/slots/0?action=restore", {"filename": "../a"}, "name: got '../a', expected 1 to"),
            ("/v1/sessions", {"action": "save", "name": "a"}, "prompt: got none, expected one of"),
            ("/v1/sessions", {"action": "drop", "name": "a"}, "action: got 'drop', expected"),
        ):
            error = http.post(path, json=body)
            assert error.status_code == 400 and message in error.json()["error"]["message"]
    assert first.stop() == 0
    second = start(tmp_path, "--operator-key=sk-op", "--api-key=sk-user")
    with second.http() as http:
        user, operator = ({"Authorization": f"Bearer {key}"} for key in ("sk-user", "sk-op"))
        restore = {"action": "restore", "name": "story"}
        assert http.post("/v1/sessions", json=restore, headers=user).status_code == 403
        http.headers.update(operator)
        restored = http.post("/v1/sessions", json=restore).json()
        assert restored["messages"] == messages and restored["loaded_tokens"] == saved["tokens"]
        text, cached = ask(http, again)
        assert text == expected and cached >= saved["tokens"]
        slot = http.post("/slots/0?action=restore", json={"filename": "slot.bin"}).json()
        assert slot["n_restored"] > saved["tokens"] and slot["n_read"] > 0
        found = http.get("/v1/sessions").json()["data"]
        assert [one["name"] for one in found] == ["slot.bin", "story"]
        assert http.get("/v1/sessions/story").json()["messages"] == messages
        assert http.delete("/v1/sessions/slot.bin").json()["deleted"]
        assert http.get("/v1/sessions/slot.bin").status_code == 404
        flags = [f"--url={http.base_url}", "--api-key=sk-op", "--max-tokens=6", "--temperature=0"]
        monkeypatch.setattr(sys, "stdin", io.StringIO("Go on.\n"))
        ended = octavo("chat", *flags, "--session=story")
        assert ended.out.splitlines()[:1] == expected.splitlines()[:1]
        assert "session story: 2 messages" in ended.message
        assert len(http.get("/v1/sessions/story").json()["messages"]) == 4
    assert second.stop() == 0


def test_a_local_chat_continues_its_session(octavo, tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    said = []
    for line in ("one", "two", "/undo", "three"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{line}\n"))
        ended = octavo("chat", *tiny, "--max-tokens=6", "--session=mine")
        assert ended.code == 0
        said.append(ended.message)
    assert "new session mine" in said[0] and "saved session mine" in said[0]
    assert "session mine: 2 messages" in said[1] and "session mine: 4 messages" in said[2]
    assert "session mine: 2 messages" in said[3]
