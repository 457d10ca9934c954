"""The page in a real browser: talks that stream, stop and change, by keyboard and side by side."""

import json
import re
import shutil

import pytest

from tests.openai_fake import fake_server

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `clients`")
pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LONG = 20_000  # milliseconds
MARKDOWN = """## A title

Some **bold** text, `code` and [a link](https://example.org/a_b).

1. one
   - inner *words*
2. two

```python
x = "<b>1</b>"
```

| a | b |
|---|---|
| 1 | 2 |

> quoted

<img src=x onerror="window.hacked = 1"> [bad](javascript:alert(1)) ![far](https://example.org/x.png)
"""


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} on this machine")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser):
    """Open a server's page; at the end nothing was complained of, nor asked of another server."""
    contexts, said, allowed = [], [], []

    def open_page(url, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(LONG)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith((url, "data:")) or said.append(asked))
        contexts.append(context)
        page.goto(url)
        page.locator("#models label").first.wait_for(state="attached")
        return page

    open_page.allowed = allowed
    yield open_page
    for context in contexts:
        context.close()
    assert not [text for text in said if not any(word in str(text) for word in allowed)]


def ask(page, text):
    """Ask by keyboard alone."""
    page.keyboard.press("Control+a")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def answered(page, count=1):
    """Wait for the last answers; returns their texts."""
    replies = page.locator(".turn:last-child .reply:not(.running) .below button").first
    replies.wait_for(state="attached")
    page.locator(".running").first.wait_for(state="detached")
    texts = page.locator(".turn:last-child .body").all_inner_texts()
    assert len(texts) == count
    return texts


def test_a_conversation_streams_from_a_model_and_metrics_move(live, opened):
    page = opened(live.url)
    page.click("#see-settings")
    for name, value in {"max_tokens": "24", "seed": "1", "temperature": "0.8"}.items():
        page.fill(f"#of-{name}", value)
    page.click("#see-metrics")
    made, first = (page.locator(".measure", has_text=name) for name in ("s made", "First token"))
    made.wait_for()
    assert first.first.locator("b").inner_text() == "–"
    page.focus("#ask")
    ask(page, "Hi there")
    assert answered(page)[0].strip(), page.locator(".reply").inner_text()
    figures = page.locator(".reply .below").inner_text()
    assert re.search(r"\d+ tokens .*first after [\d.]+ s", figures)
    playwright.expect(first.first.locator("b")).to_have_text(re.compile(r"[\d.]+ m?s"))
    heights = re.findall(r",([\d.]+)", made.locator("polyline").get_attribute("points"))
    assert min(map(float, heights)) < 26
    page.click("#see-tokens")
    ask_again = page.locator(".turn:last-child [title='Answer again']")
    ask_again.click()
    page.locator(".tokens span").first.wait_for()
    assert page.locator(".tokens span").count() >= 2
    live.at_rest()


def test_stop_ends_an_answer_here_and_on_the_server(opened):
    with fake_server(pieces={"tiny": ["word "] * 1000}, delay=0.02) as fake:
        page = opened(fake.url)
        for stop in (lambda: page.keyboard.press("Escape"), lambda: page.click("#send")):
            ask(page, "Count")
            page.locator(".turn:last-child .body", has_text="word word").wait_for()
            assert page.get_attribute("#send", "aria-label") == "Stop"
            stop()
            page.locator(".turn:last-child .below", has_text="stopped by you").wait_for()
            assert page.get_attribute("#send", "aria-label") == "Send"
            text = answered(page)[0]
            assert text.startswith("word word") and len(text) < 5000
        for _ in range(LONG // 100):  # a server learns in its own time that a client has left
            if fake.left == 2:
                break
            page.wait_for_timeout(100)
        assert fake.left == 2 and fake.running == 0
    second = fake.asked[1]["messages"]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]


def test_markdown_is_drawn_and_none_of_it_is_html(opened):
    pieces = [*MARKDOWN, "\n\u2028end"]
    with fake_server(pieces={"tiny": pieces}, thoughts=["Let me", " think."]) as fake:
        fake.calls = [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
        page = opened(fake.url)
        ask(page, "Show all")
        answered(page)
        body = page.locator(".reply .body")
        for css, text in {
            "h4": "A title",
            "strong": "bold",
            "p > code": "code",
            "a[href='https://example.org/a_b'][rel~=noreferrer]": "a link",
            "ol > li > ul em": "words",
            ".code pre": 'x = "<b>1</b>"',
            "td >> nth=1": "2",
            "blockquote": "quoted",
            "a[href='https://example.org/x.png']": "far",
        }.items():
            assert body.locator(css).inner_text() == text
        assert "[bad](javascript:alert(1))" in body.inner_text()
        assert body.locator("img, script").count() == 0
        assert not page.evaluate("'hacked' in window")
        page.locator("summary", has_text="Thought for").click()
        assert "Let me think." in page.locator("details").inner_text()
        assert '"city": "Oslo"' in page.locator(".call").inner_text()


def test_models_answer_side_by_side_each_from_its_own_past(opened):
    with fake_server(pieces={"base": ["I am base"], "tuned": ["I am", " tuned"]}) as fake:
        page = opened(fake.url)
        page.focus("#pick")
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        for _ in range(2):
            ask(page, "Who?")
            assert answered(page, 2) == ["I am base", "I am tuned"]
        places = [one.bounding_box() for one in page.locator(".turn:last-child .reply").all()]
        assert places[0]["y"] == places[1]["y"] and places[0]["x"] < places[1]["x"]
    pasts = {body["model"]: body["messages"] for body in fake.asked[2:]}
    assert [pasts[name][1]["content"] for name in ("base", "tuned")] == ["I am base", "I am tuned"]


def test_probabilities_are_shown_for_each_token_by_keyboard(opened):
    with fake_server(pieces={"tiny": ["One", " two", " three"]}) as fake:
        page = opened(fake.url)
        page.click("#see-tokens")
        for mode in ("chat", "plain"):
            page.click("#see-settings")
            page.check(f"[name=mode][value={mode}]", force=True)
            page.click("#close-panel")
            page.focus("#ask")
            ask(page, "Count")
            answered(page)
            tokens = page.locator(".tokens").last
            assert tokens.locator("span").all_inner_texts() == ["One", " two", " three"]
            tokens.focus()
            for _ in range(2):
                page.keyboard.press("ArrowRight")
            tip = page.locator("#tip")
            assert re.search(r"␣two\s*5\.0 %\s*␣other\s*3\.0 %", tip.inner_text())
            page.keyboard.press("Tab")
            assert tip.is_hidden()
    assert fake.asked[0]["logprobs"] is True and fake.asked[1]["logprobs"] == 5
    assert fake.asked[1]["prompt"] == "CountOne two threeCount"


def test_turns_are_retried_edited_deleted_and_kept(opened):
    with fake_server(pieces={"tiny": ["Answer"]}) as fake:
        page = opened(fake.url)
        page.click("#see-settings")
        page.fill("#system", "Be brief.")
        page.fill("#of-temperature", "0.5")
        page.fill("#extra", '{"stop": ["x"]}')
        page.focus("#ask")
        for text in ("First", "Second"):
            ask(page, text)
            answered(page)
        page.locator(".user [title=Edit]").last.click()
        ask(page, "Third")
        answered(page)
        page.locator("[title='Answer again']").last.click()
        answered(page)
        page.locator(".user [title='Delete this turn']").last.click()
        assert page.locator(".said").all_inner_texts() == ["First"]
        page.get_by_role("button", name="Undo").click()
        assert page.locator(".said").all_inner_texts() == ["First", "Third"]
        page.reload()
        page.locator("#chats .open").click()
        assert page.locator(".said").all_inner_texts() == ["First", "Third"]
        with page.expect_download() as found:
            page.click("#export")
        exported = json.loads(open(found.value.path(), encoding="utf-8").read())
        page.locator("#chats .icon").click()
        assert page.locator("#chats .open").count() == 0
    system = {"role": "system", "content": "Be brief."}
    asked = [[message["content"] for message in body["messages"]] for body in fake.asked]
    assert asked[-1] == asked[-2] == ["Be brief.", "First", "Answer", "Third"]
    assert fake.asked[0]["temperature"] == 0.5 and fake.asked[0]["stop"] == ["x"]
    assert exported["messages"]["tiny"] == fake.asked[-1]["messages"] + [
        {"role": "assistant", "content": "Answer"}
    ]
    assert exported["messages"]["tiny"][0] == system


def test_errors_are_plain_words_with_a_way_on(opened):
    opened.allowed += ["status of 401", "status of 503", "status of 400", "ERR_CONNECTION"]
    with fake_server(key="secret") as fake:
        fake.key = None
        page = opened(fake.url)
        fake.key = "secret"
        ask(page, "Hi")
        page.get_by_role("button", name="Enter the key").click()
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Try again").click()
        assert answered(page) == ["Hello there"]
        page.focus("#ask")
        fake.refusal = 503, "the queue is full"
        ask(page, "Again")
        page.locator(".error", has_text="The server is busy: the queue is full").wait_for()
        fake.refusal, fake.error = None, "the engine has ended"
        page.get_by_role("button", name="Try again").click()
        page.locator(".error", has_text="the engine has ended").wait_for()
        fake.refusal, fake.error = (400, "the model has no chat template"), None
        page.get_by_role("button", name="Try again").click()
        page.get_by_role("button", name="Continue as plain text").wait_for()
        fake.refusal = None
        page.get_by_role("button", name="Continue as plain text").click()
        assert answered(page) == ["Hello there"]
    page.locator("#ask").focus()
    ask(page, "Anyone?")
    page.locator(".error", has_text="cannot be reached").wait_for()


def test_images_go_with_a_message_and_a_phone_has_all_of_the_page(opened, tmp_path):
    with fake_server() as fake:
        page = opened(fake.url, viewport={"width": 390, "height": 780}, color_scheme="dark")
        picture = tmp_path / "a.png"
        page.screenshot(path=picture)
        page.set_input_files("#images", picture)
        page.locator("#attached img").wait_for()
        ask(page, "See")
        answered(page)
        page.click("#open-side")
        assert page.locator("#chats .open").inner_text() == "See"
        page.mouse.click(370, 400)
        for panel in ("#see-settings", "#see-metrics"):
            page.click(panel)
            page.locator("aside").wait_for()
            page.click("#close-panel")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        colors = [page.evaluate("getComputedStyle(document.body).backgroundColor")]
        page.click("#open-side")
        page.click("#theme")
        colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert colors == ["rgb(18, 22, 28)", "rgb(245, 247, 250)"]
    image, text = fake.asked[0]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "See"}
