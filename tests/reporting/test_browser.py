"""The page in a real browser: what no parser can promise."""

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from unspool.reporting.page import write_report

from .fake_run import SCRIPT, write_fake_run
from .test_hostile import write_hostile_run

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

MILLISECONDS = 300_000  # timeout of each browser operation; a busy machine starts the browser slowly
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed (apt install chromium)")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_fake_run(tmp_path_factory.mktemp("runs") / "tiny")
    write_report([run], run / "report.html")
    return run / "report.html"


@pytest.fixture(scope="module")
def both_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("both")
    runs = [write_fake_run(folder / "tiny"), write_fake_run(folder / "a-run-with-a-name-that-is-rather-long")]
    write_report(runs, folder / "both.html")
    return folder / "both.html"


@pytest.fixture(scope="module")
def hostile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_hostile_run(tmp_path_factory.mktemp("hostile") / "run")
    write_report([run], run / "report.html")
    return run / "report.html"


@pytest.fixture(scope="module")
def browser() -> "Iterator[sync_api.BrowserContext]":
    with sync_api.sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=str(CHROMIUM), args=FLAGS, offline=True, timeout=MILLISECONDS
        )
        context.set_default_timeout(MILLISECONDS)
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
def test_the_page_opens_offline_without_requests_or_console_errors(browser, page_file: Path, width: int):
    page, events = opened(browser, page_file, width)

    assert page.title() == "tiny · Unspool report"
    assert [event for event in events if event != f"request: {page_file.as_uri()}" and "data:," not in event] == []


@pytest.mark.parametrize(
    ("name", "width"),
    [
        *(("page_file", width) for width in (1700, 1200, 768, 390)),
        *((name, width) for name in ("both_file", "hostile_file") for width in (1700, 320)),
    ],
)
def test_nothing_scrolls_sideways(browser, request: pytest.FixtureRequest, name: str, width: int):
    page, _ = opened(browser, request.getfixturevalue(name), width)
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")

    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_text_runs_nothing_and_requests_nothing(browser, hostile_file: Path):
    page, events = opened(browser, hostile_file, 1200)
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")

    assert page.title() != "owned"
    assert page.title().startswith("tiny</pre>")
    assert page.locator("script, img, [onerror]").count() == 0
    assert [e for e in events if e != f"request: {hostile_file.as_uri()}" and "data:," not in e] == []
    # Nothing that came after it was swallowed.
    assert page.get_by_role("heading", name="Provenance").is_visible()
    assert page.locator("footer").is_visible()


def test_every_section_is_reached_from_the_contents_by_keyboard(browser, page_file: Path):
    page, _ = opened(browser, page_file, 390)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")

    page.wait_for_url("**#run1-scores")
    assert page.evaluate("document.getElementById('run1-scores').getBoundingClientRect().top") < 100


def test_headings_go_down_one_level_at_a_time_and_tables_name_their_headers(browser, both_file: Path):
    page, _ = opened(browser, both_file, 1200)
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(one => +one.tagName[1])")

    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.locator("th:not([scope])").count() == 0
    assert page.locator("table:not(:has(caption))").count() == 0
    assert page.locator("svg:not([aria-label]):not([aria-hidden])").count() == 0


def test_long_prompts_are_folded_and_cut_in_the_middle(browser, page_file: Path):
    page, _ = opened(browser, page_file, 1200)
    prompt = page.locator(".question details").first

    assert not prompt.locator("pre").is_visible()
    prompt.locator("summary").click()
    assert "[… 2,008 tokens …]" in prompt.locator("pre").inner_text()


# Contrast of a text with what it stands on: WCAG's formula, all backgrounds below it put together.
CONTRAST = """() => {
    const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
    const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
    const light = colour => { const [r, g, b] = colour.slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
    const behind = element => { const chain = [];
        for (let one = element; one; one = one.parentElement) chain.push(parse(getComputedStyle(one).backgroundColor));
        return chain.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]); };
    const found = [];
    for (const element of document.querySelectorAll('p, td, th, caption, dt, dd, small, code, summary, li, a')) {
        if (!element.innerText?.trim() || element.className === 'skip') continue;
        const colour = over(parse(getComputedStyle(element).color), behind(element));
        found.push([ratio(colour, behind(element)), element.tagName + ': ' + element.innerText.slice(0, 30)]);
    }
    for (const cell of document.querySelectorAll('.heat-text')) {
        const group = cell.parentElement, card = behind(cell.closest('figure'));
        const under = over(parse(getComputedStyle(group.querySelector('.heat-back')).fill), card);
        const heat = group.querySelector('.heat');
        const fill = heat && parse(getComputedStyle(heat).fill).slice(0, 3);
        const back = heat ? over([...fill, +heat.getAttribute('fill-opacity')], under) : under;
        found.push([ratio(parse(getComputedStyle(cell).fill), back), 'heat: ' + cell.textContent]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_enough_contrast(browser, page_file: Path, scheme: str):
    page, _ = opened(browser, page_file, 1200)
    page.emulate_media(color_scheme=scheme)
    found = page.evaluate(CONTRAST)

    assert len(found) > 300
    assert len({text for _, text in found if text.startswith("heat")}) > 5
    assert [(round(ratio, 2), text) for ratio, text in found if ratio < 4.5] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_print_is_black_on_white_with_folds_open_and_without_contents(browser, page_file: Path, scheme: str):
    page, _ = opened(browser, page_file, 800)
    page.emulate_media(media="print", color_scheme=scheme)

    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav.contents").is_visible()
    folded = page.locator("#run1-recipe pre")
    assert folded.evaluate("one => one.getBoundingClientRect().height") > 100
    assert len(page.pdf(format="A4")) > 50_000


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
