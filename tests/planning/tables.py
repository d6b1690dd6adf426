"""`tools/scaling_tables.py` as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TOOL = Path(__file__).parents[2] / "tools" / "scaling_tables.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling_tables", TOOL)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


tables = load_tool()
