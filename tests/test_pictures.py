"""The pictures of docs/concepts: readable on a phone, safe, and what `make pictures` draws."""

import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
NAMES = ("packing", "rope", "utk", "harpe", "memory", "exactness")
# Pixels of a page of 390 that a picture gets, at the smallest margins of the site.
PHONE = 350


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_readable_on_a_phone_and_runs_nothing(name):
    drawn = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    root = ET.fromstring(drawn)
    width = float(root.attrib["viewBox"].split()[2])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ?([\d.]+)px", drawn)]
    assert sizes and min(sizes) * PHONE / width >= 11
    assert root.attrib["aria-label"]
    assert root.findall(".//{*}rect")[0].attrib["fill"] == "#fff", "no background of its own"
    assert not re.search(r"<script|href=|@import|url\(|\bon\w+=", drawn)


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_shown_on_the_page_of_its_name(name):
    page = (ROOT / "docs" / "concepts" / f"{name}.md").read_text(encoding="utf-8")
    assert re.search(rf"!\[[^\]]+\]\(\.\./images/{name}\.svg\)", page)


@pytest.mark.slow
def test_the_pictures_are_what_the_code_draws():
    drawers = tool().PICTURES
    assert set(drawers) == set(NAMES)
    changed = [name for name, draw in drawers.items() if draw() + "\n" != (IMAGES / f"{name}.svg").read_text()]
    assert changed == [], "run make pictures"
