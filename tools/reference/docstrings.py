"""A griffe extension: the section `Example:` of our docstrings becomes griffe's `Examples:`, which is shown as code."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
