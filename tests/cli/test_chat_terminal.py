"""`octavo chat` in a terminal, with a server whose answers are known."""

import json
import stat
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from octavo.cli.conversation.chat_session import split_blocks
from tests.support.terminal import Terminal

ANSWER = ["# A title\n\nSome **bo", "ld** text\n\n```python\nx = 1\n\n", "y = 2\n```\n", "* one\n"]


class Answers(BaseHTTPRequestHandler):
    """Streams ANSWER; one that is asked for "forever" ends when the client goes."""

    def do_GET(self):
        self._send("application/json", [json.dumps({"data": [{"id": "known"}]})])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        endless = body["messages"][-1]["content"] == "forever"
        pieces = iter(lambda: "more ", None) if endless else ANSWER
        self._send("text/event-stream", map(self._event, pieces), pause_s=0.01 * endless)

    def _event(self, piece):
        return f"data: {json.dumps({'choices': [{'delta': {'content': piece}}]})}\n\n"

    def _send(self, kind, pieces, pause_s=0.0):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        try:
            for piece in pieces:
                self.wfile.write(piece.encode())
                time.sleep(pause_s)
        except OSError:
            self.server.stopped.set()

    def log_message(self, *_):
        pass


@pytest.fixture
def known():
    """A server that notes the bodies that it gets."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.bodies, server.stopped = [], threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def chat(known, tmp_path):
    """Opens a conversation with the server in a terminal."""

    def start() -> Terminal:
        url = f"--url=http://127.0.0.1:{known.server_port}/v1"
        terminal = Terminal("chat", url, XDG_STATE_HOME=str(tmp_path))
        terminal.until("talking with known")
        terminal.until("> ")
        return terminal

    return start


def test_markdown_is_rendered(chat):
    terminal = chat()
    terminal.press("hello\n")
    shown = terminal.until("tok/s")
    terminal.until("> ")
    terminal.press("\x04")
    assert terminal.close() == 0
    assert "**" not in shown and "```" not in shown and "# A title" not in shown
    assert all(text in shown for text in ("A title", "\x1b[1mbold\x1b[0m", "y", " • "))


def test_ctrl_c_stops_the_answer_and_what_came_is_kept(chat, known):
    terminal = chat()
    terminal.press("forever\n")
    terminal.until("more")
    terminal.press("\x03")
    terminal.until("completion tokens")
    terminal.until("> ")
    assert known.stopped.wait(20), "the server's work ends with the answer"
    terminal.press("half")
    terminal.until("half")  # the line editor reads keys from now on
    time.sleep(0.2)  # a signal that comes while a key is read waits for the next key
    terminal.press("\x03")
    terminal.until("(Ctrl-D or /bye quits)")
    terminal.press("then\n")
    terminal.until("tok/s")
    terminal.press("/exit\n")
    assert terminal.close() == 0
    said = [one["content"] for one in known.bodies[-1]["messages"]]
    assert said[0] == "forever" and said[1].startswith("more ") and said[2] == "then"


def test_the_history_is_kept_between_runs_for_its_owner_alone(chat, known, tmp_path):
    for keys in ("once\n", "\x1b[A\n"):
        terminal = chat()
        terminal.press(keys)
        terminal.until("tok/s")
        terminal.until("> ")  # a key that comes before the prompt is the terminal's
        terminal.press("\x04")
        assert terminal.close() == 0
    first, second = known.bodies
    assert first["messages"] == [{"role": "user", "content": "once"}]
    assert first["model"] == "known" and first["max_tokens"] == 1024
    assert second["messages"] == first["messages"]
    history = tmp_path / "octavo" / "chat_history"
    assert history.read_text().splitlines() == ["once", "once"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("one\n\ntwo", "one\n\n"),
        ("one\ntwo", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("~~~\n```\n\n", ""),
    ],
)
def test_a_block_is_complete_at_a_blank_line_outside_code(text, done):
    assert split_blocks(text) == (done, text.removeprefix(done))
