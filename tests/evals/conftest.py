"""A small real tokenizer and generated prose, shared by the evaluation's tests."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from unspool.data.facts import fact, pair_question, pairs_text, question
from unspool.evals import suites
from unspool.evals.heldout import Materials
from unspool.evals.run import Scoring

from .toy import TOY, entry


def make_words(count: int, seed: int = 0) -> list[str]:
    """Distinct pronounceable words."""
    rng = np.random.default_rng(seed)
    words: dict[str, None] = {}
    while len(words) < count:
        syllables = [rng.choice(list("bdfgklmnprst")) + rng.choice(list("aeiou")) for _ in range(rng.integers(2, 4))]
        words["".join(syllables)] = None
    return list(words)


def make_prose(words: list[str], num_sentences: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    sentences = []
    for _ in range(num_sentences):
        chosen = rng.choice(words, size=int(rng.integers(4, 14)))
        sentences.append(" ".join(chosen).capitalize() + rng.choice([".", ".", "!", "?"]))
    return "".join(sentence + ("\n\n" if rng.random() < 0.1 else " ") for sentence in sentences)


def train_tokenizer(texts: list[str], *, vocab_size: int, bos: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<end>", "<begin>"]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<begin>" if bos else None)


@pytest.fixture(scope="session")
def words() -> list[str]:
    return make_words(300)


@pytest.fixture(scope="session")
def documents(words: list[str]) -> list[str]:
    return [make_prose(words, 600, seed=1), make_prose(words, 900, seed=2)]


@pytest.fixture(scope="session")
def training_text(words: list[str], documents: list[str]) -> list[str]:
    worded = [f" {word} {word}" for word in words] * 3
    worded += [fact(word, "1234567", "number") + question(word, "word") + pair_question(word) for word in words]
    return [*documents, *worded, pairs_text([(word, word) for word in words])]


@pytest.fixture(scope="session")
def tokenizer(training_text: list[str]) -> PreTrainedTokenizerFast:
    return train_tokenizer(training_text, vocab_size=2000, bos=True)


@pytest.fixture(scope="session")
def coarse_tokenizer(training_text: list[str]) -> PreTrainedTokenizerFast:
    """Hardly more than bytes, and no BOS: every word is several tokens."""
    return train_tokenizer(training_text, vocab_size=330, bos=False)


@pytest.fixture(scope="session")
def materials(tokenizer: PreTrainedTokenizerFast, words: list[str], documents: list[str]) -> Materials:
    return Materials(tokenizer=tokenizer, words=words, documents=documents)


@pytest.fixture(scope="session")
def coarse_materials(coarse_tokenizer: PreTrainedTokenizerFast, words: list[str], documents: list[str]) -> Materials:
    return Materials(tokenizer=coarse_tokenizer, words=words, documents=documents)


@pytest.fixture
def toy_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """RULER's place is taken by a suite of four small tasks."""
    monkeypatch.setitem(suites.SUITES, "ruler", TOY)


@pytest.fixture
def scoring(tmp_path: Path) -> Scoring:
    return Scoring(
        model="base", model_hash="m", evals=[entry()], seed=0, out_dir=tmp_path / "scores/base", root=tmp_path
    )
