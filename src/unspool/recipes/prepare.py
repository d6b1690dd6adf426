"""The boxes of a recipe that need no model: corpora and rows.

Apart from run.py, so that preparing documents starts without importing what trains and scores.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unspool.base.artefact import MANIFEST, write_atomic
from unspool.data.config import RowsConfig
from unspool.data.corpus import build_corpus
from unspool.data.executors import check_engine
from unspool.data.rows import build_rows
from unspool.data.sources import RecallSource, Source, SyntheticSource
from unspool.model.scratch import NewModel
from unspool.model.tokenizer import load_tokenizer
from unspool.recipes.check import LoadedRecipe, check_inputs
from unspool.recipes.schema import dump_recipe


class Preparation:
    """Corpora and rows of one recipe. Building one checks everything that can be checked without work."""

    def __init__(self, loaded: LoadedRecipe) -> None:
        check_inputs(loaded)
        check_engine(loaded.recipe.engine)
        self.loaded = loaded
        self.recipe = loaded.recipe
        self.out = self.recipe.out
        self.model = self._model()
        self.tokenizer = load_tokenizer(self.model if isinstance(self.model, str) else self.model.tokenizer)
        # Nothing is written before everything is checked.
        self._begin(self._facts())

    def _facts(self) -> dict[str, Any]:
        """What is worth noting about this run from the start."""
        return {}

    def _begin(self, facts: dict[str, Any]) -> None:
        """The folder of the run, with what is known of it already."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomic(self.out / "recipe.yaml", dump_recipe(self.recipe))
        self._note(**facts)

    def corpora(self) -> dict[str, dict[str, Any]]:
        """Tokenised documents of every source that some rows use; returns their counts."""
        counts = {}
        used = {source for config in self.recipe.rows.values() for source in config.shares}
        self._generate(self.loaded.generated(used))
        for name in (name for name in self.recipe.sources if name in used):
            with self._timed(f"corpus/{name}"):
                counts[name] = self._corpus(name, self.out / "corpus" / name)
        return counts

    def _generate(self, sets: list[str]) -> None:
        """Conversations that sources of this recipe read, and that it makes itself."""
        if not sets:
            return
        # Only here: it loads torch.
        from unspool.recipes.synth import Synthesis

        generation = Synthesis(self.loaded, sets)
        generation.corpora()
        generation.make()

    def _corpus(self, name: str, folder: Path) -> dict[str, Any]:
        return build_corpus(
            self._resolved(self.recipe.sources[name]),
            folder,
            tokenizer=self.tokenizer,
            root=Path(),
            engine=self.recipe.engine,
            seed=self.recipe.seed,
        )

    def rows(self) -> dict[str, dict[str, Any]]:
        """Training rows; returns their counts."""
        counts = {}
        for name in self.recipe.rows:
            with self._timed(f"rows/{name}"):
                counts[name] = self._rows(name, self.out / "rows" / name)
        return counts

    def _rows(self, name: str, folder: Path) -> dict[str, Any]:
        config = self.recipe.rows[name]
        return build_rows(
            config,
            {source: self.out / "corpus" / source for source in config.shares},
            folder,
            tokenizer=self.tokenizer,
            seed=self.recipe.seed,
            embed=self._embed(config),
        )

    def _embed(self, config: RowsConfig) -> Any:
        """What makes vectors of texts, for rows that are filled with what is near by them."""
        if config.negatives is None or config.negatives.model is None:
            return None
        # Only here: all other rows are made without torch.
        import torch

        from unspool.model.embed import Embedder

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Embedder(self.loaded.path(config.negatives.model), tokenizer=self.tokenizer, device=device)

    def _model(self) -> str | NewModel:
        model = self.recipe.model
        if isinstance(model, str):
            return self.loaded.path(model)
        return model.model_copy(update={"tokenizer": self.loaded.path(model.tokenizer)})

    def _resolved(self, source: Source) -> Source:
        key = "prose" if isinstance(source, RecallSource | SyntheticSource) else "path"
        keys = [name for name in (key, "template") if getattr(source, name, None) is not None]
        return source.model_copy(update={name: self.loaded.path(getattr(source, name)) for name in keys})

    @contextmanager
    def _timed(self, box: str) -> Iterator[None]:
        manifest = self.out / box / MANIFEST
        before = manifest.stat().st_mtime_ns if manifest.is_file() else None
        began = time.perf_counter()
        yield
        # A box that was up to date keeps the time it took when it was made.
        if manifest.is_file() and manifest.stat().st_mtime_ns != before:
            seconds = round(time.perf_counter() - began, 1)
            self._note(seconds=self._notes().get("seconds", {}) | {box: seconds})

    def _notes(self) -> dict[str, Any]:
        path = self.out / "run.json"
        try:
            notes: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        except ValueError:
            return {}
        return notes

    def _note(self, **notes: Any) -> None:
        write_atomic(self.out / "run.json", json.dumps(self._notes() | notes, indent=1) + "\n")
