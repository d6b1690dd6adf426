"""Read texts that functions of a Python file assign to names. The file is parsed, never run."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from unspool.core.errors import ConfigError, DataError


class PythonTexts:
    """A parsed Python file. `expected` describes the right file for error messages."""

    def __init__(self, path: Path, expected: str) -> None:
        self._where, self._expected = str(path), expected
        try:
            self._tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); pass {expected}.") from error
        except SyntaxError as error:
            raise DataError(f"{path}: not Python ({error.msg}); pass {expected}.") from error

    def function(self, name: str, dataset: str = "") -> dict[str, str]:
        """Texts that a function assigns to names for a dataset, and defaults of its arguments.

        Branches whose condition is a part of the dataset's name are read only if the name contains it. Other branches
        are skipped. `a if … else b` stores a under the name, and b under the name with "_else".
        """
        for node in self._tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                found: dict[str, str] = {}
                for argument, default in zip(reversed(node.args.args), reversed(node.args.defaults), strict=False):
                    _assign(found, argument.arg, default)
                _follow(node.body, dataset, found)
                return found
        raise self._missing(name)

    def _missing(self, name: str) -> DataError:
        return DataError(f"{self._where}: {name} is missing; pass {self._expected}.")


def _names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def _follow(body: Iterable[ast.stmt], dataset: str, found: dict[str, str]) -> None:
    for node in body:
        if isinstance(node, ast.Assign):
            for name in _names(node):
                _assign(found, name, node.value)
        elif isinstance(node, ast.FunctionDef):
            _follow(node.body, dataset, found)
        elif isinstance(node, ast.If):
            holds = _holds(node.test, dataset)
            if holds is not None:
                _follow(node.body if holds else node.orelse, dataset, found)


def _assign(found: dict[str, str], name: str, value: ast.expr) -> None:
    if isinstance(value, ast.IfExp):
        _assign(found, name, value.body)
        _assign(found, f"{name}_else", value.orelse)
    else:
        parts = list(_parts(value, found))
        if all(isinstance(part, str) for part in parts):
            found[name] = "".join(map(str, parts))


def _parts(value: ast.expr, found: dict[str, str]) -> Iterator[str | None]:
    """Texts that a sum consists of; None for other expressions."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        yield from _parts(value.left, found)
        yield from _parts(value.right, found)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    else:
        yield found.get(value.id) if isinstance(value, ast.Name) else None


def _holds(test: ast.expr, dataset: str) -> bool | None:
    """Value of a condition such as `"qa" in dataset`; None for other conditions."""
    if isinstance(test, ast.BoolOp):
        parts = [_holds(part, dataset) for part in test.values]
        if None in parts:
            return None
        return any(parts) if isinstance(test.op, ast.Or) else all(parts)
    match test:
        case ast.Compare(left=ast.Constant(value=str(part)), ops=[ast.In()], comparators=[ast.Name(id="dataset")]):
            return part in dataset
    return None
