"""The pages at /ui in a real Chromium: chat, compression, the box; by keyboard, narrow and dark, and with nothing from
elsewhere. `pytest -m browser --pictures docs/images` makes the pictures of the docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import NARROW, WIDE, Browser
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from serving import TINY, app_of, engine_of, running, tokenizer

from onebox.config import EngineConfig
from onebox.engine.thread import ThreadEngine
from onebox.request import Request
from onebox.server.app import create_app

pytestmark = pytest.mark.browser
VIEWS = ("chat", "studio", "box")
BEYOND_THE_EDGE = """
return [...document.getElementById(arguments[0]).querySelectorAll("*")]
  .filter((n) => n.checkVisibility() && !n.closest(".scroll, pre, .unseen, svg"))
  .filter((n) => n.getBoundingClientRect().right > innerWidth + 1)
  .map((n) => n.outerHTML.slice(0, 80));
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with the bundled model."""
    engine = ThreadEngine(EngineConfig(str(TINY), device="cpu", max_num_seqs=4, max_model_len=8192))
    with running(create_app(engine, tokenizer=tokenizer(), served_names=["tiny"], defaults={"temperature": 0})) as at:
        yield at


@pytest.fixture(autouse=True)
def _console_stays_clean(browser: Browser, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    expected = request.node.get_closest_marker("complains")
    complaints = [text for text in browser.complaints() if not (expected and expected.args[0] in text)]
    assert not complaints


@contextmanager
def scripted(answers: Sequence[str], **options: Any) -> Iterator[tuple[str, list[Request]]]:
    """A server whose model says `answers` in turn; its URL and the requests that it got."""
    engine_options = {name: options.pop(name) for name in ("step_s", "fail_after", "phases") if name in options}
    left = iter(answers)
    engine = engine_of(lambda _: tokenizer().encode(next(left)), **engine_options)
    with running(app_of(engine, **options)) as at:
        yield at, engine.requests


def opened(browser: Browser, url: str, view: str = "chat", size: tuple[int, int] = WIDE, *, dark: bool = False) -> None:
    browser.open(f"{url}/ui/#{view}", size, dark=dark)
    browser.until(lambda: browser.all(".state.ready"))


def ask(browser: Browser, text: str) -> None:
    n = len(browser.all(".answer"))
    browser.find("#message").send_keys(text, Keys.ENTER)
    browser.until(lambda: len(browser.all(".answer")) == n + 1)


def answered(browser: Browser) -> str:
    """The last answer as shown, once it has ended."""
    browser.until(lambda: not browser.find("#stop").is_enabled())
    return browser.all(".answer .content")[-1].text


def shortened(browser: Browser) -> None:
    browser.until(lambda: "kept, by" in browser.text("#studio-state"))


def filled(browser: Browser, url: str, view: str, **options: Any) -> None:
    """A view with something in it."""
    opened(browser, url, view, **options)
    if view == "chat":
        ask(browser, "What is the capital of France?")
        answered(browser)
        browser.until(lambda: "of all" in browser.text("#meter-cache-all"))
    elif view == "studio":
        browser.find("#example").click()
        shortened(browser)
    else:
        browser.until(lambda: browser.all("#ladder svg"))
        browser.until(lambda: browser.all("#plan svg"))


def test_a_chat_round_trip_with_figures_and_nothing_from_elsewhere(browser: Browser, url: str) -> None:
    opened(browser, url)
    assert browser.text("#state") == "tiny"
    ask(browser, "What is the capital of France?")
    assert "Paris" in answered(browser)
    thinking = browser.find(".answer details")
    assert thinking.get_attribute("open") is None and "tokens" in thinking.text
    assert float(browser.text("#meter-speed")) > 0
    assert browser.text("#meter-drafts").endswith("%") and browser.text("#meter-drafts") != "0 %"
    browser.find(".settings summary").click()
    browser.find("#max-tokens").clear()
    browser.find("#max-tokens").send_keys("30")
    for _ in range(2):
        browser.find("#fresh").click()
        ask(browser, "I have wondered about it for some days now. " * 8)  # shorter prompts are not kept
        answered(browser)
    assert browser.text(".figures").startswith("30 tokens")
    assert browser.text(".figures").endswith("cut at the longest answer")
    assert int(browser.text("#meter-cache").removesuffix(" %")) > 90
    asked = browser.requests()
    assert asked and all(address.startswith(url) for address in asked)


def test_what_a_model_says_is_text_and_code_is_set_as_code(browser: Browser) -> None:
    said = 'x\n</think>\n\n<img src="/gone.png"> <script>window.hit = 1</script>\n```py\na = 1\n```\nend'
    with scripted([said]) as (url, _):
        opened(browser, url)
        ask(browser, "go")
        shown = answered(browser)
        assert '<img src="/gone.png"> <script>' in shown and "end" in shown
        assert browser.text(".answer pre") == "a = 1"
        assert not browser.all(".answer img, .answer script") and browser.script("return window.hit") is None


def test_tool_calls_are_folded_and_their_results_go_along(browser: Browser) -> None:
    call = "<tool_call>\n<function=weather>\n<parameter=city>\nLyon\n</parameter>\n</function>\n</tool_call>"
    with scripted([f"I look.\n</think>\n\n{call}", "ok\n</think>\n\nWindy."]) as (url, requests):
        opened(browser, url)
        browser.find(".settings summary").click()
        browser.find("#tools").send_keys('[{"name": "weather", "parameters": {"type": "object", "properties": {}}}]')
        ask(browser, "Weather?")
        answered(browser)
        fold = browser.find(".content details")
        assert fold.get_attribute("open") is None and fold.text == "Calls weather"
        fold.find_element("css selector", "summary").click()
        assert '"city": "Lyon"' in fold.text
        browser.find(".content textarea").send_keys("gusts from the north")
        ask(browser, "So?")
        assert answered(browser) == "Windy."
        prompt = tokenizer().rust.decode(list(requests[-1].prompt), skip_special_tokens=False)
        assert "gusts from the north" in prompt and "<function=weather>" in prompt


def test_escape_stops_an_answer_and_keeps_what_has_come(browser: Browser) -> None:
    with scripted(["x\n</think>\n\n" + "word " * 2000], step_s=0.02) as (url, _):
        opened(browser, url)
        ask(browser, "go")
        browser.until(lambda: "word" in browser.text(".answer"))
        browser.type(Keys.ESCAPE)
        assert "word" in answered(browser)
        assert browser.text(".figures").endswith("stopped")
        assert browser.focus() == "message"


def test_an_answer_that_breaks_off_says_so_and_keeps_what_has_come(browser: Browser) -> None:
    with scripted(["x\n</think>\n\nhello" + " word" * 60], fail_after=40) as (url, _):
        opened(browser, url)
        ask(browser, "first")
        assert "word word" in answered(browser)
        assert "scripted failure" in browser.text(".failure")


@pytest.mark.complains("503 (Service Unavailable)")
def test_a_question_whose_answer_never_began_can_be_sent_again(browser: Browser) -> None:
    with scripted(["x\n</think>\n\nhello"] * 2, fail_after=1) as (url, requests):
        opened(browser, url)
        ask(browser, "first")
        answered(browser)
        assert "scripted failure" in browser.text(".failure")
        assert browser.value("#message") == "first"
        ask(browser, "")
        answered(browser)
        assert [request.prompt for request in requests] == [requests[0].prompt] * 2


@pytest.mark.complains("400 (Bad Request)")  # the browser's own line about a refused request
def test_what_the_server_refuses_is_told_in_its_words_and_stays_in_the_field(browser: Browser, url: str) -> None:
    opened(browser, url)
    browser.find(".settings summary").click()
    browser.find("#temperature").send_keys("-1")
    ask(browser, "hello there")
    answered(browser)
    assert "temperature" in browser.text(".failure")
    assert browser.value("#message") == "hello there"


@pytest.mark.complains("401 (Unauthorized)")
def test_a_key_is_asked_for_and_used(browser: Browser) -> None:
    with scripted(["x\n</think>\n\nopen"], api_keys=["sesame"]) as (url, _):
        browser.open(f"{url}/ui/")
        browser.until(lambda: browser.find("#key-form").is_displayed())
        assert browser.focus() == "key"
        browser.type("sesame", Keys.ENTER)
        browser.until(lambda: browser.all(".state.ready"))
        ask(browser, "hello")
        assert answered(browser) == "open"


@pytest.mark.complains("503 (Service Unavailable)")
def test_a_start_is_told_while_it_lasts(browser: Browser) -> None:
    engine = engine_of(tokenizer().encode("x"), phases=[("read weights", 3.0)])
    with running(app_of(engine, on_start=lambda _: None)) as url:
        browser.open(f"{url}/ui/")
        browser.until(lambda: "read weights" in browser.text("#state"))
        browser.until(lambda: browser.text("#state") == "tiny")


def test_the_slider_changes_the_shorter_prompt_and_the_map(browser: Browser, url: str) -> None:
    filled(browser, url, "studio")
    before = (browser.value("#shorter"), len(browser.all("#heat s")), browser.text("#studio-state"))
    assert "Why is the eastern pier closed" in browser.text("#heat")
    browser.find("#rate").send_keys(Keys.ARROW_LEFT * 5)
    assert browser.text("#rate-shown") == "25 %"
    browser.until(lambda: browser.text("#studio-state") != before[2] and "kept, by" in browser.text("#studio-state"))
    after = (browser.value("#shorter"), len(browser.all("#heat s")))
    assert len(after[0]) < len(before[0]) and after[1] > before[1]
    assert "14 March" in after[0]
    assert "dropped: score below the cut" in browser.text("#reasons")


def test_the_shorter_prompt_is_copied(browser: Browser, url: str) -> None:
    filled(browser, url, "studio")
    browser.command("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.find("#copy").click()
    browser.until(lambda: browser.text("#copy") == "Copied")
    assert browser.script("return navigator.clipboard.readText()") == browser.value("#shorter")


def test_the_map_is_the_prompt_and_what_stays_of_it_the_shorter_one(browser: Browser, url: str) -> None:
    opened(browser, url, "studio")
    text = (
        "Ein Käse 🧀 für 12,50 € – the 😀 parcel number is 4711. " * 3 + "\n\n日本語の文です。 It came on 3 May, late."
    )
    browser.script("document.getElementById('prompt').value = arguments[0]", text)
    browser.find("#source .main").click()
    shortened(browser)
    shown = browser.script("return document.querySelector('#heat .text').textContent")
    assert shown == text


@pytest.mark.complains("400 (Bad Request)")
def test_a_method_without_its_model_says_what_is_missing(browser: Browser, url: str) -> None:
    filled(browser, url, "studio")
    Select(browser.find("#method")).select_by_value("llmlingua2")
    browser.find("#source .main").click()
    browser.until(lambda: browser.all("#studio-state .failure"))
    assert "--compress-model" in browser.text("#studio-state")
    assert not browser.find("#copy").is_enabled() and not browser.find("#why").is_displayed()


@pytest.mark.complains("400 (Bad Request)")
def test_the_box_shows_the_plan_and_a_ladder_of_the_chosen_machine(browser: Browser, url: str) -> None:
    filled(browser, url, "box")
    assert "weights" in browser.text("#plan") and "KV pages" in browser.text("#plan")
    first = browser.find("#ladder svg").get_attribute("aria-label")
    assert "INT4" in first and "MTP-2" in first
    Select(browser.find("#f-box")).select_by_value("h200")
    browser.until(lambda: browser.find("#ladder svg").get_attribute("aria-label") != first)
    Select(browser.find("#f-box")).select_by_value("rtx-4090")
    browser.until(lambda: browser.all("#ladder .failure"))
    assert "do not fit" in browser.text("#ladder")
    Select(browser.find("#f-model")).select_by_value("qwen3.5-35b-a3b")
    browser.until(lambda: browser.all("#ladder svg"))


def test_everything_is_reached_by_keyboard_alone(browser: Browser, url: str) -> None:
    browser.open(f"{url}/ui/")
    browser.until(lambda: browser.focus() == "message")
    back = []
    for _ in range(6):
        browser.type(Keys.SHIFT + Keys.TAB)
        back.append(browser.focus())
    assert back == ["log", "The box", "Compression", "Chat", "onebox", "Skip to content"]
    browser.type(Keys.TAB, Keys.TAB)
    browser.type(Keys.TAB)
    assert browser.focus() == "Compression"
    assert browser.script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.type(Keys.ENTER)
    browser.until(lambda: browser.find("#studio").is_displayed())
    while browser.focus() != "prompt":
        browser.type(Keys.TAB)
    browser.type("The bridge opens at nine. Tea is served in the hall, as always. The toll is 4 euros.", Keys.TAB)
    assert browser.focus() == "question"
    browser.type("What is the toll?", Keys.ENTER)
    shortened(browser)
    browser.type(Keys.TAB)
    assert browser.focus() == "rate"
    browser.type(Keys.ARROW_LEFT)
    assert browser.text("#rate-shown") == "45 %"
    while browser.focus() != "heat":
        browser.type(Keys.TAB)
    browser.type(Keys.HOME)
    assert "The" in browser.text("#reason")
    browser.type(Keys.END)
    assert "toll" in browser.text("#reason") or "?" in browser.text("#reason")
    at = browser.find("#heat").get_attribute("aria-activedescendant")
    assert browser.find(f"#{at}").get_attribute("aria-label")


@pytest.mark.parametrize("view", VIEWS)
def test_a_narrow_screen_shows_all_without_scrolling_sideways(browser: Browser, url: str, view: str) -> None:
    filled(browser, url, view, size=NARROW)
    width = browser.script("return document.documentElement.scrollWidth")
    assert width <= NARROW[0]
    assert not browser.script(BEYOND_THE_EDGE, view)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_texts_stand_out_and_controls_have_names(browser: Browser, url: str, view: str, dark: bool) -> None:
    filled(browser, url, view, dark=dark)
    if view == "chat":
        browser.find(".settings summary").click()
    paper = browser.script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(21, 24, 26)" if dark else "rgb(251, 250, 247)")
    assert not browser.faint()
    assert not browser.nameless()


@pytest.mark.parametrize("view", VIEWS)
def test_pictures_of_the_docs(browser: Browser, url: str, view: str, pictures: Path) -> None:
    filled(browser, url, view)
    if view == "studio":
        browser.find("#rate").send_keys(Keys.ARROW_LEFT * 3)
        browser.until(
            lambda: "35 % kept" in browser.text("#studio-state") or "34 % kept" in browser.text("#studio-state")
        )
        browser.find("#heat").send_keys(Keys.ARROW_RIGHT * 30)
    if view != "chat":
        browser.resize(WIDE[0], browser.script("return document.body.scrollHeight"))
        browser.script("scrollTo(0, 0)")
    path = pictures / f"ui-{view}.png"
    browser.picture(path)
    assert path.read_bytes()[:4] == b"\x89PNG" and 8_000 < path.stat().st_size < 120_000
