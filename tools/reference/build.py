"""The generated pages by name; as a program, write them into a folder: `python tools/reference/build.py FOLDER`."""

import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from reference.api_page import api_page
from reference.command_page import command_page
from reference.families_page import families_page
from reference.recipe_page import recipe_page
from reference.registry_pages import (
    backends_page,
    losses_page,
    optimizers_page,
    rope_methods_page,
    sources_page,
    strategies_page,
    suites_page,
)
from reference.study_page import study_page

PAGES: dict[str, Callable[[], str]] = {
    "reference/recipe.md": recipe_page,
    "reference/sources.md": sources_page,
    "reference/strategies.md": strategies_page,
    "reference/rope-methods.md": rope_methods_page,
    "reference/optimizers.md": optimizers_page,
    "reference/losses.md": losses_page,
    "reference/suites.md": suites_page,
    "reference/backends.md": backends_page,
    "reference/study.md": study_page,
    "reference/commands.md": command_page,
    "reference/api.md": api_page,
    "reference/families.md": families_page,
}


def main() -> None:
    folder = Path(sys.argv[1])
    for name, build in PAGES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(build(), encoding="utf-8")


if __name__ == "__main__":
    main()
