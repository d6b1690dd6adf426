"""Unspool: extend the context window of open language models, from Python or from one recipe file.

The public names are listed in `__init__.pyi`, which type checkers read too. Each is loaded when it is first used, so
that `import unspool` takes milliseconds.
"""

import re as _re
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import Any as _Any

__version__ = "0.1.0"

_IMPORT = _re.compile(r"^    from (\S+) import (\w+) as \2$", _re.MULTILINE)
_HOMES = {name: home for home, name in _IMPORT.findall(_Path(__file__).with_suffix(".pyi").read_text())}
__all__ = list(_HOMES)


def __getattr__(name: str) -> _Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'unspool' has no attribute {name!r}")
    found = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = found  # so that Python calls this function only once per name
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
