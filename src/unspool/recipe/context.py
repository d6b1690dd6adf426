"""The context of a run: its recipe, its folder, its ranks, and notes."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from unspool.core.artifacts import MANIFEST, write_atomic
from unspool.core.errors import naming
from unspool.core.phases import Phases
from unspool.models.config import NewModel
from unspool.recipe.load import LoadedRecipe
from unspool.recipe.schema import Recipe, dump_recipe

if TYPE_CHECKING:
    from unspool.training.parallel.ranks import Ranks

T = TypeVar("T")
# Builds one folder of a run, such as corpus/books. A study replaces this to share folders between runs.
Share = Callable[["RunContext", str, Callable[[Path], Any]], Any]


def build_in_place(context: "RunContext", folder: str, build: Callable[[Path], T]) -> T:
    """Build a folder of the run at its own path."""
    return build(context.out / folder)


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """State that every step of a run needs. Creating one does no work."""

    loaded: LoadedRecipe
    ranks: "Ranks | None" = None  # None: a single process
    share: Share = build_in_place
    trained: set[str] = field(default_factory=set)  # stages that match the recipe
    phases: Phases = field(default_factory=Phases)  # of this process, not of the whole run

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def out(self) -> Path:
        return self.recipe.out

    @property
    def is_leader(self) -> bool:
        return self.ranks is None or self.ranks.is_leader

    @cached_property
    def model(self) -> str | NewModel:
        """The recipe's model with its paths resolved."""
        model = self.recipe.model
        if isinstance(model, str):
            return self.loaded.model_path(model)
        return model.model_copy(update={"tokenizer": self.loaded.model_path(model.tokenizer)})

    @cached_property
    def tokenizer(self) -> Any:
        from unspool.models.tokenizer import load_tokenizer  # import late: it loads transformers

        return load_tokenizer(self.model if isinstance(self.model, str) else self.model.tokenizer)

    def on_leader(self, make: Callable[[], T]) -> T:
        """Run `make` on rank 0 and broadcast its JSON-serializable result to all ranks."""
        if self.ranks is None or self.ranks.world_size == 1:
            return make()
        from unspool.training.parallel.mesh import from_leader

        return from_leader(self.ranks, make)

    def build(self, folder: str, build: Callable[[Path], T]) -> T:
        """Build one folder of the run; record the seconds it took unless it was up to date."""
        with self.timed(folder):
            found: T = self.share(self, folder, build)
        return found

    @contextmanager
    def timed(self, folder: str) -> Iterator[None]:
        manifest = self.out / folder / MANIFEST
        before = manifest.stat().st_mtime_ns if manifest.is_file() else None
        began = time.perf_counter()
        with naming(self.out / folder), self.phases(folder):
            yield
        # A folder that was up to date keeps the time of its build.
        if manifest.is_file() and manifest.stat().st_mtime_ns != before:
            seconds = round(time.perf_counter() - began, 1)
            self.note(seconds=self.notes().get("seconds", {}) | {folder: seconds})

    def start(self, **facts: Any) -> None:
        """Create the run's folder with the full recipe and the facts known at the start."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomic(self.out / "recipe.yaml", dump_recipe(self.recipe))
        self.note(**facts)

    def notes(self) -> dict[str, Any]:
        path = self.out / "run.json"
        try:
            notes: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        except ValueError:
            return {}
        return notes

    def note(self, **notes: Any) -> None:
        if self.is_leader:
            write_atomic(self.out / "run.json", json.dumps(self.notes() | notes, indent=1) + "\n")
