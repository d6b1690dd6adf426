"""The page in a real browser: what no parser can promise."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from unspool.report.render import write_report

from .fake_run import SCRIPT, write_fake_run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed (apt install chromium)")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_fake_run(tmp_path_factory.mktemp("runs") / "tiny")
    write_report([run], run / "report.html")
    return run / "report.html"


@pytest.fixture(scope="module")
def browser() -> "Iterator[sync_api.BrowserContext]":
    with sync_api.sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=str(CHROMIUM), args=FLAGS, offline=True
        )
        yield context
        context.close()


def opened(browser: "sync_api.BrowserContext", page_file: Path, width: int) -> "tuple[sync_api.Page, list[str]]":
    """The page, and everything it asked for or complained about."""
    page = browser.new_page()
    events: list[str] = []
    page.on("console", lambda message: events.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: events.append(f"error: {error}"))
    page.on("request", lambda request: events.append(f"request: {request.url}"))
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(page_file.as_uri())
    return page, events


@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_opens_offline_asks_for_nothing_and_complains_of_nothing(browser, page_file: Path, width: int):
    page, events = opened(browser, page_file, width)

    assert page.title() == "tiny · Unspool report"
    assert [event for event in events if event != f"request: {page_file.as_uri()}" and "data:," not in event] == []


@pytest.mark.parametrize("width", [1200, 768, 390, 320])
def test_nothing_scrolls_sideways(browser, page_file: Path, width: int):
    page, _ = opened(browser, page_file, width)
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")

    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_script_in_a_models_answer_stays_text(browser, page_file: Path):
    page, _ = opened(browser, page_file, 1200)

    assert page.title() != "x"
    assert page.locator("script").count() == 0
    assert page.get_by_text(SCRIPT).is_visible()


def test_even_an_unescaped_script_would_not_run(browser, page_file: Path):
    page, events = opened(browser, page_file, 1200)
    page.evaluate(
        """() => {
            const script = document.createElement('script');
            script.textContent = "document.title = 'x'";
            document.body.append(script);
        }"""
    )

    assert page.title() != "x"
    assert any("Content Security Policy" in event for event in events)


def test_no_label_of_a_chart_is_clipped_or_covers_another(browser, page_file: Path):
    page, _ = opened(browser, page_file, 1200)
    problems = page.evaluate(
        """() => [...document.querySelectorAll('svg.chart')].flatMap(svg => {
            const frame = svg.getBoundingClientRect();
            const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
            const clipped = texts.filter(([, r]) => r.left < frame.left - 1 || r.right > frame.right + 1
                || r.top < frame.top - 1 || r.bottom > frame.bottom + 1).map(([name]) => 'clipped: ' + name);
            const covered = texts.flatMap(([a, p], i) => texts.slice(i + 1).filter(([, q]) =>
                p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3)
                .map(([b]) => `overlap: ${a} / ${b}`));
            return [...clipped, ...covered];
        })"""
    )

    assert page.locator("svg.chart text").count() > 100
    assert problems == []


def test_dark_mode_turns_the_page_dark(browser, page_file: Path):
    page, _ = opened(browser, page_file, 1200)
    brightness = "parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(brightness)
    page.emulate_media(color_scheme="dark")

    assert (light > 200, page.evaluate(brightness) < 60) == (True, True)
