"""Write the tables and figures of docs/results and README.md from the committed answers: `make results`, on a CPU.

    python tools/results.py [PAGE …]            write the blocks of all pages, or of some
    python tools/results.py --check             write nothing; exit status 1 if a block or figure is out of date
    python tools/results.py collect FOLDER OUT  copy the answers, recipes and logs of a study or run to OUT

A block of a page begins with its kind and settings in YAML, and ends with its own mark:

    <!-- results: scores
    data: smollm2-32k/study
    columns: {32K: niah/32K}
    rows: {raised base: abf, untouched: base}
    -->
    …
    <!-- end results -->

The kinds are the functions in tools/result_blocks.py. docs/results/data.md describes the data.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from result_blocks import BLOCKS
from result_data import RESULTS, Output
from unspool.core.artifacts import write_atomic
from unspool.core.config import lookup
from unspool.core.errors import ConfigError, UnspoolError
from unspool.studies.raw_results import collect

README = RESULTS.parents[1] / "README.md"
# At the start of a line: an indented one is an example.
BLOCK = re.compile(r"^(<!-- results: (\w+)\n(.*?)^-->\n).*?^(<!-- end results -->)", re.DOTALL | re.MULTILINE)
BEGIN = re.compile(r"^<!-- results:", re.MULTILINE)


def write_page(text: str, label: str) -> tuple[str, dict[Path, str]]:
    """Return a page with its blocks written again, and the figures that they show, by file."""
    figures: dict[Path, str] = {}

    def block(found: re.Match[str]) -> str:
        head, kind, settings, end = found.groups()
        try:
            made: Output = lookup(BLOCKS, kind, kind="block")(yaml.safe_load(settings) or {})
        except KeyError as error:
            raise ConfigError(f"{label}: block {kind}: the setting {error} is missing.") from error
        except (UnspoolError, yaml.YAMLError) as error:
            raise ConfigError(f"{label}: block {kind}: {error}") from error
        figures.update(made.figures)
        return f"{head}\n{made.text}\n\n{end}"

    return BLOCK.sub(block, text), figures


def outdated(pages: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each file that differs from what the data give, with its new content."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if len(BEGIN.findall(text)) != len(BLOCK.findall(text)):
            raise ConfigError(f"{page}: a block has no `<!-- end results -->`, or its settings have no closing `-->`.")
        written, figures = write_page(text, page.name)
        for path, content in {page: written, **figures}.items():
            if not path.is_file() or path.read_text(encoding="utf-8") != content:
                yield path, content


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["collect"]:
        return _collect(arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pages", nargs="*", type=Path, metavar="PAGE", help="pages to write; default: all results and README.md"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    chosen = parser.parse_args(arguments)
    changed = list(outdated(chosen.pages or [README, *sorted(RESULTS.glob("*.md"))]))
    for path, content in changed:
        if not chosen.check:
            write_atomic(path, content)
        print(f"{path}: {'out of date; run `make results`' if chosen.check else 'written'}")
    if not changed:
        print("results: all tables and figures are up to date")
    return 1 if changed and chosen.check else 0


def _collect(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="results.py collect", description="Copy results without weights.")
    parser.add_argument("folder", type=Path, help="folder of `unspool study` or `unspool run`")
    parser.add_argument("out", type=Path, help="such as docs/results/smollm2-32k/study-2")
    chosen = parser.parse_args(arguments)
    for name in collect(chosen.folder, chosen.out):
        size = sum(path.stat().st_size for path in (chosen.out / name).iterdir())
        print(f"{chosen.out / name}: {size / 1000:.0f} KB")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UnspoolError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
