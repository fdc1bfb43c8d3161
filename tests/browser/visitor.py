"""A person at the page, and what must hold of every visit: no other host is asked, and nothing is
refused by the page's own policy or fails in its scripts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page

DATA = Path(__file__).parent / "data"
REFUSED = "Failed to load resource"
"""Beginning of what the console says of an answer that is not 2xx, which the page shows itself."""


class Visitor:
    """One tab of its own; `kept` is what its session storage begins with."""

    def __init__(
        self, browser: Browser, kept: dict[str, Any] | None = None, **options: Any
    ) -> None:
        options.setdefault("viewport", {"width": 1280, "height": 860})
        self._context = browser.new_context(**options)
        self.page: Page = self._context.new_page()
        self.hosts: set[str] = set()
        self.posts: list[tuple[str, Any]] = []
        """Path and body of each request that was sent."""
        self.faults: list[str] = []
        for name, value in (kept or {}).items():
            text = json.dumps(json.dumps(value))
            line = f"if (sessionStorage.getItem('octavo.{name}') === null)"
            self.page.add_init_script(f"{line} sessionStorage.setItem('octavo.{name}', {text})")
        self.page.on("request", self._asked)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))

    def open(self, url: str) -> None:
        self.page.goto(url)

    def close(self) -> None:
        """Ends the visit, and checks it."""
        self._context.close()
        assert len(self.hosts) <= 1, self.hosts
        assert not self.faults, self.faults

    def ask(self, text: str) -> None:
        """Sends a message and waits until the answer is complete."""
        self.page.fill("#draft", text)
        self.page.press("#draft", "Enter")
        self.wait_for_answer()

    def wait_for_answer(self) -> None:
        self.page.wait_for_selector("#stop-button[hidden]", state="attached")
        self.page.wait_for_selector(".message.assistant:last-of-type .facts", state="attached")

    def answer(self) -> str:
        return self.page.inner_text(".message.assistant:last-of-type .message-body")

    def press(self, name: str) -> None:
        """Presses the button of that name in the last message."""
        self.page.locator(".message").last.get_by_role("button", name=name, exact=True).click()

    def _asked(self, request: Any) -> None:
        self.hosts.add(urlsplit(request.url).netloc)
        if request.method == "POST":
            self.posts.append((urlsplit(request.url).path, json.loads(request.post_data)))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(REFUSED):
            self.faults.append(message.text)


def stream_of(chunks: list[dict[str, Any]]) -> str:
    """Returns chunks as a server's stream of events."""
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def recorded_answer() -> tuple[str, str]:
    """Returns a question and the stream that SmolLM2 answered it with."""
    found = json.loads((DATA / "answer.json").read_text())
    entries = [
        (text, entry(token_id, own, logprob) | {"top_logprobs": [entry(*other) for other in top]})
        for text, token_id, own, logprob, top in found["tokens"]
    ]
    chunks = [
        {
            "id": "chatcmpl-recorded",
            "choices": [{"delta": {"content": text}, "logprobs": {"content": [made]}}],
        }
        for text, made in entries
    ]
    return found["question"], stream_of(chunks)


def entry(token_id: int, text: str, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "bytes": list(text.encode()), "logprob": logprob}


def plain_answer(text: str) -> str:
    """Returns a stream whose text comes in one chunk."""
    return stream_of([{"id": "chatcmpl-x", "choices": [{"delta": {"content": text}}]}])
