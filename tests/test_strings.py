"""tools/strings.py lists every kind of string with its place."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "tools" / "strings.py"
spec = importlib.util.spec_from_file_location("unspool_strings", PATH)
assert spec is not None and spec.loader is not None
strings = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = strings
spec.loader.exec_module(strings)

SOURCE = '''"""A module."""
# A comment
# in two lines.
NAMES = {"key with words": 1}["key with words"]

@app.command("go")
def go(size: int = typer.Option(8, help="tokens per row")) -> None:
    """Go there."""
    logger.info(f"step {size}: loss falls")
    if size == "not listed here":
        raise ConfigError(f"size {size} is too small; " + "use more.")
    table.add_column("Rows")  # one word

class Plan:
    """A plan."""

    size: int
    """Tokens per row."""
'''


def found(tmp_path: Path, name: str, text: str) -> list[tuple[int, str, str]]:
    path = tmp_path / name
    path.write_text(text)
    return [(string.line, string.kind, string.text) for string in strings.strings_of(path)]


def test_python_strings_have_kind_and_line(tmp_path: Path) -> None:
    assert found(tmp_path, "go.py", SOURCE) == [
        (1, "doc", "A module."),
        (2, "comment", "A comment in two lines."),
        (4, "text", "key with words"),
        (7, "help", "tokens per row"),
        (8, "help", "Go there."),
        (9, "log", "step {size}: loss falls"),
        (11, "error", "size {size} is too small; use more."),
        (12, "comment", "one word"),
        (12, "text", "Rows"),
        (15, "doc", "A plan."),
        (18, "doc", "Tokens per row."),
    ]


OTHER_FILES = {
    "a.yaml": (
        "# Two\n# lines.\n#\n# Third.\nkey: 1  # why\nabout: three plain words\n",
        "1 Two lines.|4 Third.|5 why|6 three plain words",
    ),
    "a.html.j2": (
        '{# no #}<p title="Read me">Loss of\n{{ name }}</p>{% if x %}{{ x }}{% endif %}',
        "1 Loss of {name}|1 Read me",
    ),
    "a.md": (
        "# Title\n\nOne\nparagraph.\n\n```sh\ncode here\n```\n- item\n- second\n",
        "1 # Title|3 One paragraph.|9 - item|10 - second",
    ),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_yaml_templates_and_pages(tmp_path: Path, name: str) -> None:
    text, expected = OTHER_FILES[name]
    assert "|".join(f"{line} {string}" for line, _, string in found(tmp_path, name, text)) == expected


def test_sample_takes_whole_sentences_of_each_kind_and_repeats_with_the_seed() -> None:
    files = sorted(PATH.parents[1].glob("src/unspool/core/*.py"))
    listed = [string for path in files for string in strings.strings_of(path)]
    drawn = strings.sample(listed, 12, seed=1)
    assert len(drawn) == 12 and {"doc", "comment", "error"} <= {string.kind for string in drawn}
    assert drawn == strings.sample(listed, 12, seed=1) != strings.sample(listed, 12, seed=2)
    assert all(any(string.text in whole.text for whole in listed) for string in drawn)


def test_options_choose_kinds_and_folders(capsys: pytest.CaptureFixture[str]) -> None:
    strings.main(["--kind", "help", "--kind", "log", str(PATH.parents[1] / "src/unspool/cli")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 50 and all(line.startswith("src/unspool/cli/") for line in lines)
    assert {line.split(": ")[1] for line in lines} == {"help", "log"}
