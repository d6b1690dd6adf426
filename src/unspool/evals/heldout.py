"""Held-out text for haystacks and token losses: the user's files, or the bundled book."""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from unspool.core.artifacts import file_digest
from unspool.core.errors import ConfigError
from unspool.data.facts import single_token_words, word_list
from unspool.data.sources.base import FileSource, read_strictly
from unspool.data.sources.jsonl import text_or_jsonl
from unspool.evals.backends.base import TOKEN_IDS, PromptForm

SHIPPED = "assets/demo/heldout.jsonl.zst"
# Higher than the average of any language we know, so that enough text is read.
CHARS_PER_TOKEN = 8
# Reading less saves no time.
MIN_CHARS = 4_000_000
THREADS = 4  # at most, that build prompts


class Heldout(NamedTuple):
    """A request for held-out text."""

    text: str | None  # files, as named in a recipe; None: the bundled book
    tokens: int


def heldout_source(text: str | None) -> FileSource:
    return text_or_jsonl(str(files("unspool") / SHIPPED) if text is None else text)


def heldout_files(text: str | None, root: Path) -> list[Path]:
    """List the files. Raises ConfigError if there are none."""
    return heldout_source(text).units(root)


def check_text(argument: str, text: str) -> None:
    """Raise ConfigError, which names the argument, if `text` is no file, folder or pattern with files."""
    try:
        heldout_files(text, Path.cwd())
    except ConfigError as error:
        raise ConfigError(f"`{argument}`: {error}") from None


def heldout_digest(text: str | None, root: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in heldout_files(text, root)}


def heldout_documents(text: str | None, root: Path, *, tokens: int) -> list[str]:
    """Read documents in file order until there is text for `tokens` tokens, or until the end."""
    documents: list[str] = []
    missing = max(MIN_CHARS, tokens * CHARS_PER_TOKEN)
    for document in read_strictly(heldout_source(text), heldout_files(text, root)):
        if missing <= 0:
            break
        documents.append(document.text)
        missing -= len(document.text)
    return documents


@dataclass(frozen=True, kw_only=True)
class Materials:
    """Materials of generated prompts."""

    tokenizer: Any
    words: list[str] = field(repr=False)
    documents: list[str] = field(repr=False)
    form: PromptForm = TOKEN_IDS


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Inputs common to all entries of a plan."""

    tokenizer: Any
    seed: int
    root: Path
    """Base folder of relative paths."""
    heldout_tokens: Mapping[str | None, int] = field(default_factory=dict)
    """By text: the maximum of tokens that any entry needs. Entries share documents, which determine the prompts."""
    form: PromptForm = TOKEN_IDS

    context: int | None = None
    """Context length of the model; None if unknown."""

    @cached_property
    def words(self) -> list[str]:
        return single_token_words(self.tokenizer, word_list())

    @cached_property
    def _documents(self) -> dict[str | None, list[str]]:
        return {text: heldout_documents(text, self.root, tokens=most) for text, most in self.heldout_tokens.items()}

    @cached_property
    def tokenizer_copies(self) -> list[Any]:
        """One tokenizer per thread: a call changes settings that a call in another thread would read."""
        return [copy.deepcopy(self.tokenizer) for _ in range(min(THREADS, os.cpu_count() or 1))]

    def materials(self, heldout: Heldout | None) -> Materials:
        documents = [] if heldout is None else self._documents[heldout.text]
        return Materials(tokenizer=self.tokenizer, words=self.words, documents=documents, form=self.form)
