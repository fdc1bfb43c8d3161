"""The chat view: what a person does with it does what it says, against the live model."""

import json

from tests.browser.conftest import KEY
from tests.browser.visitor import plain_answer
from tests.support.live_server import until

CHAT = "**/v1/chat/completions"


def test_the_key_is_asked_for_until_it_is_right_and_stays_in_the_tab(stranger, server):
    page = stranger.page
    stranger.open(server.url)
    for key, note in (("wrong", "kept until you close this tab"), (KEY, "Invalid API key")):
        page.wait_for_selector(f"#key-dialog[open] >> text={note}")
        page.fill("#key-input", key)
        page.press("#key-input", "Enter")
    assert until(lambda: page.input_value("#model") == "smollm2")
    assert not page.is_visible("#key-dialog") and page.is_visible("#key-button")
    assert page.evaluate("localStorage.length") == 0
    assert page.context.cookies() == []


def test_a_server_without_a_model_is_asked_again(stranger, server):
    stranger.page.add_init_script(f"sessionStorage.setItem('octavo.key', {json.dumps(KEY)!r})")
    none = json.dumps({"object": "list", "data": []})
    stranger.page.route("**/v1/models", lambda route: route.fulfill(body=none), times=1)
    stranger.open(server.url)
    stranger.page.wait_for_selector("text=No model is loaded.")
    stranger.page.wait_for_selector("#sampling .field", state="attached")


def test_an_answer_streams_and_is_announced_once_it_is_complete(visitor):
    visitor.ask("Name the capital of France.")
    assert "Paris" in visitor.answer()
    assert "Paris" in visitor.page.inner_text("#status")
    assert "tokens/s" in visitor.page.inner_text(".facts")
    (path, body), *_ = visitor.posts
    assert path == "/v1/chat/completions" and body["stream"] and body["temperature"] == 0


def test_retry_makes_a_version_and_both_can_be_read(visitor):
    visitor.ask("Name one colour.")
    first = visitor.answer()
    visitor.page.evaluate("document.querySelector('#settings-button').click()")
    visitor.page.get_by_label("temperature", exact=False).first.fill("1.5")
    visitor.press("Retry")
    visitor.wait_for_answer()
    visitor.page.wait_for_selector("text=2 of 2")
    assert visitor.posts[-1][1]["temperature"] == 1.5
    assert visitor.posts[-1][1]["messages"] == visitor.posts[-2][1]["messages"]
    visitor.press("Previous version")
    assert visitor.answer() == first


def test_an_edited_message_takes_the_place_of_what_followed(visitor):
    visitor.ask("Say one.")
    visitor.ask("Say two.")
    page = visitor.page
    page.get_by_role("button", name="Edit").first.click()
    page.fill(".edit-box textarea", "Say three.")
    page.press(".edit-box textarea", "Enter")
    visitor.wait_for_answer()
    assert visitor.posts[-1][1]["messages"] == [{"role": "user", "content": "Say three."}]
    assert page.locator(".message").count() == 2


def test_escape_stops_an_answer_and_what_has_come_stays(visitor, server):
    page = visitor.page
    page.evaluate("sessionStorage.setItem('octavo.sampling', '{\"ignore_eos\": true}')")
    page.reload()
    page.wait_for_selector("#sampling .field", state="attached")
    page.fill("#draft", "Count as far as you can.")
    page.press("#draft", "Enter")
    assert until(lambda: len(visitor.answer()) > 40)
    page.keyboard.press("Escape")
    visitor.wait_for_answer()
    assert "stopped" in page.inner_text(".facts") and len(visitor.answer()) > 20
    with server.http() as http:
        left = http.get("/v1/requests").json()["data"]
    assert all(one["state"] == "finished" for one in left)


def test_the_system_prompt_comes_first(visitor):
    visitor.page.click("#settings-button")
    visitor.page.fill("#system-prompt", "You are brief.")
    visitor.page.click("#settings-close")
    visitor.ask("Hello")
    assert visitor.posts[-1][1]["messages"][0] == {"role": "system", "content": "You are brief."}


def test_a_token_shows_what_else_was_likely_and_another_one_forks(visitor):
    page = visitor.page
    visitor.ask("Tell me about rivers.")
    visitor.press("Tokens")
    tokens = page.locator(".message .tokens .token")
    before = [tokens.nth(at).inner_text() for at in range(5)]
    tokens.nth(5).hover()
    page.wait_for_selector("#alternatives:not([hidden])")
    assert page.locator(".alternative").count() >= 5
    tokens.first.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    chosen = page.locator(".alternative:not([disabled]) .word").first.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_selector("text=2 of 2")
    visitor.wait_for_answer()
    path, body = visitor.posts[-1]
    assert path.endswith("/fork") and body["keep"] == 5 and len(body["then"]) == 1
    assert [tokens.nth(at).inner_text() for at in range(5)] == before
    assert tokens.nth(5).inner_text().strip() == chosen.strip("· ")
    assert tokens.count() > 6, "the model has gone on"


WORD = """(prose, word) => {
  const walker = document.createTreeWalker(prose, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const at = node.data.indexOf(word);
    if (at < 0) continue;
    const range = document.createRange();
    range.setStart(node, at);
    range.setEnd(node, at + word.length);
    const { left, top, width, height } = range.getBoundingClientRect();
    return [left + width / 2, top + height / 2];
  }
}"""
"""Returns the middle of a word that is shown."""


def test_a_word_of_the_text_shows_what_else_was_likely_and_another_one_forks(visitor):
    page = visitor.page
    visitor.ask("Tell me about rivers.")
    text = visitor.answer()
    word = text.split()[3].strip(".,")
    prose = page.locator(".message .prose").last
    page.mouse.move(*prose.evaluate(WORD, word))
    page.wait_for_selector("#alternatives:not([hidden])")
    chosen = page.locator(".alternative[disabled] .word").inner_text()
    assert chosen.strip("· ") and chosen.strip("· ") in word
    other = page.locator(".alternative:not([disabled])").first
    wanted = other.locator(".word").inner_text()
    other.click()
    page.wait_for_selector("text=2 of 2")
    visitor.wait_for_answer()
    path, body = visitor.posts[-1]
    assert path.endswith("/fork") and len(body["then"]) == 1
    begins = text[: text.index(word)]
    assert visitor.answer().startswith(begins.rstrip())
    assert visitor.answer()[len(begins.rstrip()) :].strip().startswith(wanted.strip("· "))
    page.mouse.move(1, 1)
    page.wait_for_selector("#alternatives[hidden]", state="attached")


def test_a_character_of_markdown_is_found_in_its_text(visitor):
    """Each word stands once in the text, so that its place there is known."""
    text = (
        "# Alpha *beta*\n\nGamma **delta** [epsilon](https://example.org/zeta), `eta`\ntheta.\n\n"
        "- iota\n- kappa\n\n```python\nprint(1)\nlambda_2 = 3\n```\n\n| mu | nu |\n|---|---|\n"
        "| xi | omicron |\n\n> rho"
    )
    found = visitor.page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import("/web/markdown.js");
          const { placeInText } = await import("/web/prose.js");
          const root = document.createElement("div");
          new MarkdownView(root).show(text);
          const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
          const places = [];
          for (let node = walker.nextNode(); node; node = walker.nextNode()) {
            if (node.parentElement.closest(".code-head")) continue;
            for (const { 0: word, index: offset } of node.data.matchAll(/\\w+/g)) {
              places.push([word, placeInText(root, { node, offset }, text)]);
            }
          }
          return places;
        }""",
        text,
    )
    words = dict(found)
    assert {"Alpha", "beta", "delta", "epsilon", "eta", "theta", "print", "mu", "rho"} <= {*words}
    assert "zeta" not in words
    wrong = {word: at for word, at in found if not text.startswith(word, -1 if at is None else at)}
    assert not wrong and words["print"] > text.index("python")


def test_after_a_reload_an_alternative_goes_on_in_the_last_message(visitor):
    """A branch of a branch, whose request is unknown after a reload, is a prefilled answer."""
    visitor.ask("Tell me about rivers.")
    for _ in range(2):
        if visitor.page.get_by_role("button", name="Tokens", exact=True).count():
            visitor.press("Tokens")
        visitor.page.locator(".tokens .token").nth(3).click()
        visitor.page.locator(".alternative:not([disabled])").first.click()
        visitor.page.wait_for_selector("text=2 of 2 >> nth=0" if _ == 0 else "text=3 of 3")
        visitor.wait_for_answer()
        visitor.page.reload()
        visitor.page.wait_for_selector(".message.assistant .facts")
    path, body = visitor.posts[-1]
    assert path == "/v1/chat/completions" and body["continue_final_message"] is True
    assert body["messages"][-1]["role"] == "assistant"


def test_what_a_model_writes_is_never_html(visitor):
    text = (
        "<img src=x onerror=alert(1)><script>alert(2)</script>\n\n[a](javascript:alert(3)) "
        "![b](http://elsewhere.example/x.png) <b>c</b>\n\n"
        "```html\n<i>d</i>\n```\n\n| <u> | e |\n|--|--|\n| f | g |"
    )
    visitor.page.route(
        CHAT, lambda route: route.fulfill(body=plain_answer(text), content_type="text/event-stream")
    )
    visitor.ask("Try it.")
    body = visitor.page.locator(".message.assistant .prose")
    for tag in ("img", "script", "b", "i", "u", "iframe"):
        assert body.locator(tag).count() == 0
    assert "<img src=x onerror=alert(1)>" in body.inner_text()
    hrefs = body.locator("a").evaluate_all("links => links.map((link) => link.href)")
    assert hrefs == ["http://elsewhere.example/x.png"], "a picture of another host is a link"


def test_markdown_becomes_its_elements(visitor):
    text = (
        "# Title\n\nSome *soft* and **strong** words, `code`, ~~gone~~,"
        " snake_case_name and 2 * 3 * 4.\n\n"
        "1. one\n2. two\n   - inner\n\n> quoted\n\n| a | b |\n|:--|--:|\n| 1 | 2 |\n\n---\n\n"
        "```python\ndef f(x):  # why\n    return 'text'\n```"
    )
    visitor.page.route(
        CHAT, lambda route: route.fulfill(body=plain_answer(text), content_type="text/event-stream")
    )
    visitor.ask("Try it.")
    prose = visitor.page.locator(".message.assistant .prose")
    texts = {
        selector: prose.locator(selector).all_inner_texts()
        for selector in (
            "h1",
            "em",
            "strong",
            "p > code",
            "del",
            "ol > li",
            "li li",
            "blockquote",
            "th",
            "td.right",
            "pre",
            ".k",
            ".c",
            ".s",
        )
    }
    assert texts == {
        "h1": ["Title"],
        "em": ["soft"],
        "strong": ["strong"],
        "p > code": ["code"],
        "del": ["gone"],
        "ol > li": ["one", "two\ninner"],
        "li li": ["inner"],
        "blockquote": ["quoted"],
        "th": ["a", "b"],
        "td.right": ["2"],
        "pre": ["def f(x):  # why\n    return 'text'"],
        ".k": ["def", "return"],
        ".c": ["# why"],
        ".s": ["'text'"],
    }
    assert "snake_case_name and 2 * 3 * 4" in prose.inner_text()


def test_a_refusal_of_the_server_is_shown_and_the_page_goes_on(visitor):
    refused = '{"error": {"message": "the queue is full", "code": 429}}'
    visitor.page.route(CHAT, lambda route: route.fulfill(status=429, body=refused), times=1)
    visitor.ask("Hello")
    assert visitor.page.inner_text(".fault") == "the queue is full"
    visitor.press("Retry")
    visitor.wait_for_answer()
    visitor.page.wait_for_selector(".fault", state="hidden")


def test_the_prompt_is_shown_as_the_tokens_that_the_model_reads(visitor, server):
    page = visitor.page
    page.fill("#draft", "Hello there")
    page.click("#prompt-button")
    page.wait_for_selector("#prompt-tokens .token")
    with server.http() as http:
        messages = [{"role": "user", "content": "Hello there"}]
        tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    shown = page.locator("#prompt-tokens .token")
    assert shown.count() == len(tokens)
    titles = shown.evaluate_all("spans => spans.map((span) => span.title)")
    assert titles == [f"token {token}" for token in tokens]
    assert "<|im_start|>" in page.locator("#prompt-tokens .special").all_inner_texts()
    assert page.inner_text("#prompt-note").startswith(f"{len(tokens)} tokens, of at most 512.")
