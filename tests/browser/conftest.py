"""The page in headless Chromium, against a live server with the default model.

Not part of `make test`: `make browser` installs what it needs and runs it, with the Chromium of the
system (Debian's package `chromium`, or what CHROMIUM names).
"""

import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

from tests.browser.visitor import Visitor
from tests.support.live_server import LiveServer

KEY = "browser-key"


@pytest.fixture(scope="session")
def server():
    server = LiveServer("smollm2", "--kv-cache-memory-bytes=32MiB", key=KEY)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def chromium():
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.fail("no Chromium: install the package `chromium`, or set CHROMIUM to its path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--font-render-hinting=none"]
        )
        yield browser
        browser.close()


@pytest.fixture
def stranger(chromium):
    """A visitor without a key."""
    visitor = Visitor(chromium)
    yield visitor
    visitor.close()


@pytest.fixture
def visitor(chromium, server):
    """A visitor whose tab has the key, on the chat view, with short and repeatable answers."""
    visitor = Visitor(chromium, {"key": KEY, "sampling": {"max_tokens": 24, "temperature": 0}})
    visitor.open(server.url)
    visitor.page.wait_for_selector("#sampling .field", state="attached")
    yield visitor
    visitor.close()
