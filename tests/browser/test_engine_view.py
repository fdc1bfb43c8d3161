"""The engine view, live and of a recording: what it draws is what the engine does, and time can be
stopped and gone through.
"""

import subprocess
import sys
import threading

import pytest

from tests.browser.visitor import Visitor
from tests.support.live_server import until
from tests.support.shown_recording import write_recording

COLOURS = """canvas => {
  const { width, height } = canvas;
  const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
  const colour = (_, at) => data.slice(4 * at, 4 * at + 3).join();
  return new Set(Array.from({ length: data.length / 4 }, colour)).size;
}"""
"""Counts the colours on a canvas."""


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Serves the recording; gives the page's address."""
    path = tmp_path_factory.mktemp("recording") / "steps.jsonl"
    write_recording(path)
    command = [sys.executable, "-m", "octavo.cli.main", "replay", str(path), "--serve", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline().split()[-1]
        process.terminate()


@pytest.fixture
def student(chromium, recording):
    """A visitor of the recording, paused at its first step."""
    visitor = Visitor(chromium)
    visitor.open(recording)
    page = visitor.page
    page.wait_for_selector(".request")
    assert until(lambda: place(page)[1] == 443)
    page.get_by_role("button", name="Pause").click()
    go(page, 0)
    yield visitor
    visitor.close()


def place(page):
    """Returns the number of the frame that is shown, and of the last."""
    text = page.inner_text(".place").replace(",", "")
    first, _, last = text.partition(" of ")
    return int(first or 0), int(last or 0)


def slide(page, index):
    """Moves the slider."""
    page.locator(".player input").evaluate(
        "(slider, at) => { slider.value = at; slider.dispatchEvent(new Event('input')); }", index
    )


def go(page, index):
    """Moves the slider, and waits until that frame is drawn."""
    slide(page, index)
    assert until(lambda: place(page)[0] == index + 1)
    page.wait_for_selector("#engine[aria-busy=false]")
    settle(page)


def settle(page):
    """Waits until what was last done is drawn."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def picture(page):
    """Returns all that is shown of a frame."""
    settle(page)
    texts = [page.inner_text(name) for name in ("#figures", "#queues", "#map-summary")]
    return [*texts, page.locator(".map canvas").evaluate("canvas => canvas.toDataURL()")]


def test_requests_of_others_are_seen_while_they_run(visitor, server):
    page = visitor.page
    page.click("text=Engine")
    page.wait_for_selector("text=No requests.")

    def ask():
        with server.openai() as client:
            client.completions.create(
                model="smollm2", prompt="Once", n=3, max_tokens=300, extra_body={"ignore_eos": True}
            )

    asking = threading.Thread(target=ask)
    asking.start()
    page.wait_for_selector(".request >> nth=2")
    assert page.locator("section[aria-label=Running] .request").count() == 3
    assert page.locator(".map canvas").evaluate(COLOURS) >= 4
    page.keyboard.press(" ")
    still = picture(page)
    asking.join()
    assert picture(page) == still, "a paused view stands still"
    page.keyboard.press(" ")
    page.wait_for_selector("text=No requests.")
    assert "decoded" in page.inner_text("#strip-readout")


def test_a_step_forward_and_one_back_is_the_same_picture(student):
    page = student.page
    go(page, 98)
    there = picture(page)
    assert "Swapped out" in there[1] and "KV full" in there[1]
    page.keyboard.press(".")
    assert until(lambda: place(page)[0] == 100)
    assert picture(page) != there
    page.keyboard.press(",")
    assert until(lambda: place(page)[0] == 99)
    assert picture(page) == there


def test_a_frame_that_comes_late_is_not_shown(student):
    """An answer of the server comes after a later one; the view stays where the player is."""
    page = student.page
    go(page, 442)
    there = picture(page)
    held = []

    def hold(route):
        held.append(route)

    page.route("**/v1/engine/recording/1", hold)
    slide(page, 98)
    assert until(lambda: page.wait_for_timeout(20) or held)
    go(page, 442)
    held[0].continue_()
    page.wait_for_timeout(200)
    assert picture(page) == there


def test_playing_through_ends_where_jumping_does(student):
    page = student.page
    go(page, 430)
    page.get_by_label("Speed").select_option(label="20 a second")
    page.get_by_role("button", name="Play").click()
    assert until(lambda: place(page)[0] == 443)
    page.wait_for_selector("role=button[name=Play]")
    played = picture(page)
    go(page, 10)
    go(page, 442)
    assert picture(page) == played and "No request" in played[1]


def test_a_block_names_its_request_and_points_it_out(student):
    page = student.page
    go(page, 98)
    page.focus(".map-box")
    page.keyboard.press("Home")
    readout = page.inner_text("#map-hover")
    assert readout.startswith("Block 0: in use · r") and "blocks" in readout
    name = readout.split(" · ")[1].split(",")[0]
    settle(page)
    assert page.inner_text(".request.focused .request-name") == name
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#map-hover").startswith("Block 1: ")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert page.inner_text("#map-hover").startswith("Block 1: ")
    row = page.locator(".request").nth(2)
    row.hover()
    settle(page)
    name = row.locator(".request-name").inner_text()
    assert page.locator(".request.focused .request-name").all_inner_texts() == [name]
    assert page.inner_text("#map-hover").startswith(f"{name}, running: ")


def test_as_many_blocks_name_a_request_as_the_summary_says(student):
    page = student.page
    for at in (5, 98, 442):
        go(page, at)
        held = int(page.inner_text("#map-summary").split(" of ")[0])
        page.focus(".map-box")
        page.keyboard.press("Home")
        cells = []
        for _ in range(144):
            cells.append(page.inner_text("#map-hover"))
            page.keyboard.press("ArrowRight")
        assert sum(": in use" in text or ": shared" in text for text in cells) == held
