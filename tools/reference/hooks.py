"""MkDocs hooks: add the generated pages and the search shim, and show links to files outside of docs/ as paths."""

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
SHIM = "assets/javascripts/iframe-worker.js"
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:]+)\)")


def on_config(config: Any) -> Any:
    # The offline plugin would load the shim from a server; this one is part of the site.
    config.extra["polyfills"] = [SHIM]
    return config


def on_files(files: Files, config: Any) -> Files:
    # Here and not above, because MkDocs restores the path after it has loaded this file.
    sys.path.insert(0, str(HERE.parent))
    from reference.build import PAGES

    for name, build in PAGES.items():
        files.append(File.generated(config, name, content=build()))
    files.append(File.generated(config, SHIM, content=(HERE / "iframe-worker.js").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Files of the repository that are not on the site are named instead of linked."""
    docs = Path(config.docs_dir)
    folder = (docs / page.file.src_uri).parent

    def replace(found: re.Match[str]) -> str:
        text, target = found.groups()
        path = Path(os.path.normpath(folder / target.partition("#")[0]))
        is_page = path.is_relative_to(docs) and not path.is_dir()
        if is_page or not target.partition("#")[0] or not path.exists():
            return found[0]
        name = f"`{path.relative_to(docs.parent).as_posix()}`"
        return name if text.strip("`") == name.strip("`") else f"{text} ({name})"

    return _LINK.sub(replace, markdown)
