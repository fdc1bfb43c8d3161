"""How the page looks: like the stored pictures, within its width, and readable by a machine's rules
of accessibility.

`make browser UPDATE=1` stores new ones. They are of Debian 12's Chromium with its DejaVu
fonts; other fonts differ by more than the tolerance.
"""

import os
from io import BytesIO
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image, ImageChops

from tests.browser.conftest import KEY
from tests.browser.test_engine_view import go, recording, settle, student  # noqa: F401
from tests.browser.visitor import Visitor, recorded_answer
from tests.support.live_server import until

IMAGES = Path(__file__).parents[2] / "docs" / "images"
REJECTED = Path(__file__).parents[2] / "build" / "browser"
"""Folder of the pictures that differ from the stored ones."""
UPDATE = bool(os.environ.get("UPDATE"))
MAX_BYTES = 300_000
MAX_SHARE = 0.01
"""Largest share of pixels that may differ by more than FAINT."""
FAINT = 24
PHONE = {"width": 390, "height": 844}
SMALL = {"width": 320, "height": 568}


@pytest.fixture
def chat(chromium, server):
    """Returns a function that opens a chat with the recorded answer."""
    opened = []

    def open_chat(**options):
        visitor = Visitor(chromium, {"key": KEY}, **options)
        opened.append(visitor)
        question, stream = recorded_answer()
        visitor.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=stream, content_type="text/event-stream"),
        )
        visitor.open(server.url)
        visitor.page.wait_for_selector("#sampling .field", state="attached")
        visitor.ask(question)
        visitor.page.locator(".facts").evaluate("element => { element.textContent = ''; }")
        return visitor

    yield open_chat
    for visitor in opened:
        visitor.close()


def check(page, name):
    """Compares a picture of the page with the stored one."""
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(0, 0)
    settle(page)
    taken = Image.open(BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    path = IMAGES / f"{name}.png"
    if UPDATE:
        IMAGES.mkdir(exist_ok=True)
        taken.quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)
    stored = Image.open(path).convert("RGB")
    assert stored.size == taken.size
    difference = ImageChops.difference(stored, taken).convert("L")
    differing = sum(difference.histogram()[FAINT + 1 :]) / (taken.width * taken.height)
    if differing > MAX_SHARE:
        REJECTED.mkdir(parents=True, exist_ok=True)
        taken.save(REJECTED / path.name)
    assert differing <= MAX_SHARE, f"{name}: {differing:.1%} of the pixels differ"


def test_the_chat_looks_as_stored(chat):
    visitor = chat()
    visitor.press("Tokens")
    page = visitor.page
    page.locator(".facts").evaluate("element => { element.textContent = ''; }")
    page.locator(".tokens .token").nth(19).click()
    page.evaluate("document.activeElement.blur()")
    check(page, "page-chat")


def test_the_chat_looks_as_stored_on_a_dark_phone(chat):
    visitor = chat(viewport=PHONE, color_scheme="dark")
    visitor.page.evaluate("document.querySelector('#transcript').scrollTop = 0")
    check(visitor.page, "page-chat-phone")


def test_the_engine_looks_as_stored(student):  # noqa: F811
    go(student.page, 98)
    check(student.page, "page-engine")


def test_the_engine_looks_as_stored_on_a_dark_phone(student):  # noqa: F811
    student.page.set_viewport_size(PHONE)
    student.page.emulate_media(color_scheme="dark")
    go(student.page, 98)
    check(student.page, "page-engine-phone")


def test_the_pictures_are_small():
    assert sum(path.stat().st_size for path in IMAGES.glob("*.png")) < MAX_BYTES


@pytest.mark.parametrize("size", [PHONE, SMALL], ids=["phone", "small"])
def test_nothing_reaches_beyond_a_narrow_page(chat, student, size):  # noqa: F811
    for page in (chat(viewport=size).page, student.page):
        page.set_viewport_size(size)
        settle(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        wide = page.evaluate(
            "[...document.querySelectorAll('button, select, input, textarea, canvas')]"
            ".filter((one) => one.checkVisibility() && !one.closest('.sampling, .hidden'))"
            ".filter((one) => one.getBoundingClientRect().right > innerWidth + 1)"
            ".map((one) => one.id || one.textContent)"
        )
        assert wide == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_rules_of_accessibility_find_nothing(chat, student, scheme):  # noqa: F811
    visitor = chat(color_scheme=scheme)
    page = visitor.page
    found = Axe().run(page)
    page.click("#settings-button")
    settings = Axe().run(page)
    page.click("#settings-close")
    visitor.press("Tokens")
    page.locator(".tokens .token").nth(8).click()
    tokens = Axe().run(page)
    student.page.emulate_media(color_scheme=scheme)
    go(student.page, 98)
    engine = Axe().run(student.page)
    for name, results in (
        ("chat", found),
        ("settings", settings),
        ("tokens", tokens),
        ("engine", engine),
    ):
        assert results.violations_count == 0, f"{name}: {results.generate_report()}"


def test_everything_is_reached_by_keyboard(chat):
    page = chat().page
    names = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        names.add(
            page.evaluate(
                "(document.activeElement.textContent || document.activeElement.id).trim()"
            )
        )
    assert names >= {"Skip to the content", "Chat", "Engine", "Edit", "Retry", "Tokens"}
    assert names >= {"Settings", "Prompt", "New", "Send", "draft"}
    page.locator("#help-button").focus()
    page.keyboard.press("Enter")
    assert page.is_visible("#help-dialog")
    page.keyboard.press("Escape")
    assert until(lambda: not page.is_visible("#help-dialog"))
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "draft"


def test_a_wish_for_less_motion_leaves_none(chat):
    page = chat(reduced_motion="reduce").page
    assert page.evaluate("document.getAnimations().length") == 0
