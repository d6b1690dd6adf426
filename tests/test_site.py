"""The built site: no warnings, nothing from the network, search without a server, no page wider than a phone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = Path("/usr/bin/chromium")
WIDE, NARROW = 1280, 390  # pixels
SCHEMES = {"light": "default", "dark": "slate"}
PAGES = (
    "index.html",
    "tutorials/first-run.html",
    "reference/recipe.html",
    "reference/api.html",
    "reference/commands.html",
    "results/smollm2-32k.html",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs", reason="needs `make docs` or pip install '.[docs]'")
    folder: Path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM.exists():
        pytest.skip("needs /usr/bin/chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_the_screen_and_load_nothing_from_the_network(site, browser, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    for name in PAGES:
        page.goto((site / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert (
            page.locator("body").get_attribute("data-md-color-scheme") == {"light": "default", "dark": "slate"}[scheme]
        )
    page.close()
    assert [url for url in requested if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.parametrize(
    ("query", "expected"),
    [("YaRN", "reference/rope-methods.html"), ("out of memory", "how-to/out-of-memory.html"), ("resume", "resume")],
)
def test_search_finds_pages_without_a_server(site, browser, query, expected):
    page = browser.new_page(viewport={"width": WIDE, "height": 900})
    page.goto((site / "index.html").as_uri())
    page.click("input.md-search__input")
    page.keyboard.type(query)
    results = page.locator(".md-search-result__link")
    results.first.wait_for()
    page.wait_for_function("document.querySelector('.md-search-result__meta').innerText.includes('matching')")
    addresses = [link.get_attribute("href") or "" for link in results.all()]
    page.close()
    assert any(expected in address for address in addresses[:5])
