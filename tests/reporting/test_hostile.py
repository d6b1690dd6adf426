"""Text that wants to be more than text: in outputs, prompts, names, titles and errors."""

import json
import shutil
from pathlib import Path

import pytest

from unspool.reporting.gather import gather
from unspool.reporting.page import write_report
from unspool.reporting.text_formats import render_markdown

from .fake_run import fake_scores, fake_steps, write_fake_run, write_scores
from .test_render import Page

SCRIPT = "<script>document.title='owned'</script>"
EVIL = f"</pre></details></table>{SCRIPT}<img src=x onerror=alert(1)>\x00\u202e\u2067&amp;"


def write_hostile_run(run_dir: Path) -> Path:
    """The same text in every place that takes one from outside."""
    write_fake_run(run_dir)
    recipe = run_dir / "recipe.yaml"
    # A recipe is YAML, which holds no control characters as they are.
    text = recipe.read_text().replace("name: tiny\n", f"name: {json.dumps('tiny' + EVIL)}\n# {SCRIPT}\n", 1)
    recipe.write_text(text, encoding="utf-8")
    cells, samples = fake_scores("utk")
    for sample in samples:
        if "output" in sample:
            prompt = {"start": EVIL, "end": EVIL, "cut_tokens": 3}
            sample |= {"output": EVIL + sample["output"], "reference": EVIL, "prompt": prompt}
    write_scores(run_dir, "utk", cells, samples)
    # The prompt that is shown is the first model's.
    cells, samples = fake_scores("base")
    write_scores(run_dir, "base", cells, [{**one, "prompt": {"start": EVIL, "end": EVIL}} for one in samples])
    shutil.copytree(run_dir / "scores" / "abf", run_dir / "scores" / "<b>model")
    bad = {"file": EVIL, "record": EVIL, "reason": EVIL, "detail": EVIL}
    (run_dir / "corpus" / "books" / "quarantine.jsonl").write_text(json.dumps(bad) + "\n")
    left = {"document": EVIL, "part": EVIL, "reason": EVIL}
    (run_dir / "corpus" / "books" / "left_out.jsonl").write_text(json.dumps(left) + "\n")
    steps = fake_steps("abf")
    steps[0] |= {"wrong": EVIL, "skipped": True, "losses": {EVIL: 1.0}}
    (run_dir / "stages" / "abf" / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    facts = json.loads((run_dir / "run.json").read_text())
    facts |= {"base_model": EVIL, "versions": {EVIL: EVIL}}
    (run_dir / "run.json").write_text(json.dumps(facts))
    manifest = run_dir / "corpus" / "books" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["counts"]["quarantined"] = {EVIL: 2}
    content |= {"inputs": {EVIL: EVIL}, "unspool": EVIL}
    manifest.write_text(json.dumps(content))
    return run_dir


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hostile_run(tmp_path_factory.mktemp("runs") / "hostile")


def test_no_tag_and_no_attribute_comes_from_a_file(hostile_run: Path, fake_run: Path):
    out = hostile_run.parent / "page.html"
    write_report([hostile_run], out)
    html = out.read_text(encoding="utf-8")
    page = Page(html)  # fails on tags that do not balance

    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "iframe"})
    assert not any(key.startswith("on") for _, attrs in page.tags for key in attrs)
    assert page.text.count(SCRIPT) > 10, "the text itself is to be seen"
    assert not any(character in html for character in "\x00\u202e\u2067")


def test_markdown_holds_no_tag_outside_code(hostile_run: Path):
    text = render_markdown([gather(hostile_run)])
    outside, fence = [], ""
    for line in text.split("\n"):
        if fence:
            fence = "" if line == fence else fence
        elif line.startswith("```"):
            fence = line.removesuffix("text")
        else:
            outside.append(line)

    assert fence == "", "a fence was left open"
    assert not [line for line in outside if "<script" in line and "`" not in line]
    assert not any(character in text for character in "\x00\u202e\u2067")
