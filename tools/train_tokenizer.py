"""Train the tokenizer of the bundled base model: byte-level BPE with 4,096 tokens.

    python tools/train_tokenizer.py OUT_DIR BOOKS.jsonl.zst …

Each word of the shipped list becomes one token, with and without a leading space, so that recalling a word takes one
token. The same holds for the words of stated facts. The vocabulary includes UtK's knot tokens.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from unspool.data.facts import fact, pairs_text, word_list
from unspool.data.sources.base import read_strictly
from unspool.data.sources.jsonl import JsonlSource
from unspool.data.strategies.utk.special_tokens import KNOTS

VOCABULARY = 4096
END = "<|endoftext|>"
# Like GPT-2's pattern, but each digit is a token, and the marks between JSON strings stay together.
SPLIT = r""""[:,] "|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CHARS_PER_BOOK = 400_000
WORD_LISTS = 1500


def training_text(paths: list[Path]) -> Iterator[str]:
    source = JsonlSource(kind="jsonl", path="unused")
    for document in read_strictly(source, paths):
        yield document.text[:CHARS_PER_BOOK]
    words = word_list()
    rng = np.random.default_rng(0)
    for _ in range(WORD_LISTS):
        keys, values = rng.permutation(len(words)), rng.permutation(len(words))
        yield pairs_text([(words[key], words[value]) for key, value in zip(keys, values, strict=True)])
        yield " ".join(fact(words[key], words[value], "word") for key, value in zip(keys, values, strict=True))


def train(paths: list[Path]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, *KNOTS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(paths), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        additional_special_tokens=list(KNOTS),
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    out_dir, *files = sys.argv[1:]
    train([Path(file) for file in files]).save_pretrained(out_dir)
