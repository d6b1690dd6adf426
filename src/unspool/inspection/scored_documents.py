"""Documents by their scores: a histogram, the best and the worst, with the text of the corpus."""

from dataclasses import replace

import numpy as np

from unspool.core.errors import ConfigError, DataError
from unspool.core.sizes import format_size
from unspool.data.document_scores import read_scores
from unspool.inspection.detokenize import FoundTokenizer
from unspool.inspection.input_documents import Corpus
from unspool.inspection.items import Item, Show, Summary, check_index, histogram_lines
from unspool.inspection.run_paths import DataPath, check_files, find_data


class ScoredDocuments:
    """A `Collection` of the documents of a scores folder, best first."""

    def __init__(self, place: DataPath, found_tokenizer: FoundTokenizer) -> None:
        check_files(place.files)
        folder = place.files[0].parent
        try:
            self._ids, self._lens, self._gains = read_scores(folder)
        except (KeyError, ValueError) as error:
            raise DataError(f"{place.path}: its Arrow file holds no scores; run `unspool pack` again.") from error
        corpus = folder.absolute().parents[1] / "corpus" / folder.name
        if not corpus.is_dir():
            raise ConfigError(
                f"{place.path}: the texts of these scores are missing; keep {corpus}, or run `unspool tokenize` again."
            )
        self._place = place
        self._corpus = Corpus(find_data(corpus), found_tokenizer)
        if len(self._corpus) != len(self._gains):
            raise DataError(f"{place.path}: its scores are of another corpus; run `unspool pack` again.")
        self._order = np.lexsort((np.arange(len(self._gains)), -self._gains))  # best first
        self._ranks = np.argsort(self._order, kind="stable")

    @property
    def _short(self) -> int:
        return int(self._place.settings.get("short", 0))

    def summary(self) -> Summary:
        short = self._lens <= self._short
        mean = float((self._gains * self._lens).sum() / max(1, self._lens.sum()))
        of_corpus = self._corpus.summary()
        long = self._place.settings.get("long")
        contexts = f"{format_size(long)} against {format_size(self._short)} tokens" if isinstance(long, int) else ""
        facts = [
            ("method", str(self._place.settings.get("method", ""))),
            ("contexts", contexts),
            ("gain 0", f"{int(short.sum()):,} documents of at most {format_size(self._short)} tokens"),
            ("tokenizer", dict(of_corpus.facts).get("tokenizer", "")),
        ]
        return replace(
            of_corpus,
            path=self._place.path,
            kind="scores",
            headline=f"{len(self._gains):,} scored documents, {int(self._lens.sum()):,} tokens, mean gain {mean:.4f} "
            "nats per token",
            facts=[(name, value) for name, value in facts if value],
            lines=histogram_lines(self._gains[~short], "gain"),
        )

    def pick(self, *, indices: list[int], count: int, seed: int, source: str | None) -> list[int]:
        """Choose documents: the given ones, or half of `count` from the best and half from the worst scored ones."""
        if source is not None:
            raise ConfigError("`source` is for datasets, which can mix sources; these scores are of one source.")
        for index in indices:
            check_index(index, len(self._gains), "document")
        if indices:
            return indices
        # Documents of gain 0 by definition are not the worst.
        scored = self._order[self._lens[self._order] > self._short]
        best = scored[: -(-count // 2)]
        worst = scored[len(best) :][::-1][: count - len(best)]
        return [*best.tolist(), *worst.tolist()]

    def item(self, index: int, show: Show) -> Item:
        found = self._corpus.item(index, show)
        rank = f"gain {self._gains[index]:.4f}, rank {self._ranks[index] + 1:,} of {len(self._gains):,}"
        return replace(found, facts=[rank, *found.facts])
