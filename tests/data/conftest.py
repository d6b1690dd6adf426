"""A small byte-level tokenizer and a text to go with it, made on the spot."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCE = "the river runs past an old mill where nobody has ground any corn since the war ended long ago"


def prose(num_words: int, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(SENTENCE.split(), size=num_words).tolist())


def build_tokenizer(*, bos: bool = False, eos: bool = True) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([prose(500, seed=0)], trainer)
    backend.add_special_tokens([AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True)])
    if bos:
        begin = backend.token_to_id("<|begin|>")
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
        )
    special = {"eos_token": "<|end|>"} if eos else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()
