"""Load a training setup from a user's file: `train.py:build` names a function that returns it."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from unspool.core.errors import ConfigError
from unspool.models.location import first_line

# Order of a returned tuple: the first arguments of `audit`.
NAMES = ("model", "data", "step_fn")
EXAMPLE = "unspool.verification.audits.example:build"


def load_setup(target: str) -> dict[str, Any]:
    """Run the function and return arguments for `audit`. Errors in the function become a ConfigError."""
    place, _, name = target.rpartition(":")
    if not place:
        raise ConfigError(
            f"audit {target}: name a function, such as train.py:build. It takes no arguments and returns a "
            "transformers.Trainer, or a model, its data and a step_fn."
        )
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, name, None)
        if not callable(found):
            raise ConfigError(f"audit {target}: {place} has no function {name!r}.")
        setup = found()
    except ConfigError:
        raise
    except Exception as error:  # any type: this is the user's code
        raise ConfigError(f"audit {target}: {first_line(error)} (-v shows the traceback).") from error
    if isinstance(setup, dict):
        return setup
    if isinstance(setup, tuple):
        return dict(zip(NAMES, setup, strict=False))
    return {"model": setup}


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(
            f"audit: {path} does not exist; give a Python file and a function in it, such as train.py:build."
        )
    # Like `python train.py`, so that it can import modules from its folder.
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
