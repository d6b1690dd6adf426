"""A corpus, opened for looking: its documents as tokens give them back."""

import numpy as np
import pyarrow as pa

from unspool.base.errors import ConfigError, DataError
from unspool.data.corpus_store import CorpusReader
from unspool.inspect.choose import check_index, choose
from unspool.inspect.damage import check_files
from unspool.inspect.place import Place
from unspool.inspect.reading import Reading
from unspool.inspect.summary import Summary, manifest_facts
from unspool.inspect.views import Item, Part, Show, control_roles, spans_of


class Corpus:
    """A `Collection` of tokenised documents."""

    def __init__(self, place: Place, reading: Reading) -> None:
        self._place = place
        self._reading = reading
        check_files(place.files)
        try:
            self._docs = CorpusReader(place.files)
        except (KeyError, AttributeError, ValueError, OSError, pa.ArrowException) as error:
            raise DataError(f"{place.path}: its Arrow files hold no documents of unspool; build them again.") from error

    def __len__(self) -> int:
        return len(self._docs)

    def summary(self) -> Summary:
        source = self._place.settings.get("source")
        facts = [
            ("documents", f"{len(self):,}"),
            ("tokens", f"{self._docs.num_tokens:,}"),
            ("source", _describe(source) if isinstance(source, dict) else ""),
            ("tokenizer", self._reading.name or "not found"),
        ]
        known = {name for name, _ in facts}
        counts = {name: value for name, value in self._place.counts.items() if name not in known}
        notes = [] if self._place.manifest else ["There is no manifest.json: unfinished work, or files from elsewhere."]
        return Summary(
            path=self._place.path,
            kind="documents",
            headline=f"{len(self):,} {'document' if len(self) == 1 else 'documents'}, {self._docs.num_tokens:,} tokens",
            facts=[(name, value) for name, value in [*facts, *manifest_facts(counts)] if value],
            lengths=self._docs.lens,
            notes=[*self._reading.notes, *notes],
        )

    def pick(self, *, indices: list[int], count: int, seed: int, source: str | None) -> list[int]:
        if source is not None:
            raise ConfigError("--source is for rows, which can mix several; a corpus holds one source.")
        for index in indices:
            check_index(index, len(self), "document")
        return indices or choose(range(len(self)), count, seed)

    def item(self, index: int, show: Show) -> Item:
        tokens = self._docs[index]
        decoder = self._reading.decoder
        mask = self._docs.loss_mask(index)
        # Without a mask nobody has decided yet what will be asked for; that is the rows' business.
        asked = np.ones(len(tokens), dtype=np.bool_) if mask is None else mask
        # Conversations end as their template ends them.
        eos = None if decoder is None or mask is not None else decoder.eos
        unended = eos is not None and len(tokens) and int(tokens[-1]) != eos
        name = self._docs.id(index)
        return Item(
            index=index,
            name=f"document {index}",
            among=f"of 0–{len(self) - 1}",
            facts=[name, f"{len(tokens):,} tokens", "no EOS at its end" if unended else "", _loss(mask)],
            parts=[
                Part(
                    title=name,
                    length=len(tokens),
                    spans=spans_of(tokens, control_roles(tokens, decoder), asked, decoder, show),
                    group=index,
                    trained=None if mask is None else int(mask.sum()),
                )
            ],
        )


def _loss(mask: np.ndarray | None) -> str:
    return "" if mask is None else f"loss on {100 * float(mask.mean()):.1f}% of tokens"


def _describe(source: dict[str, object]) -> str:
    return " ".join(str(source[key]) for key in ("kind", "path", "prose") if source.get(key))
