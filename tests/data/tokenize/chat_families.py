"""The chat formats of well-known models: their templates, and small tokenizers of their kind with their control tokens.

The templates are written for these tests after the formats that the models' makers document.
"""

import json
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from unspool.data.sources.base import Message
from unspool.data.tokenize.chat import ChatEncoder, Encoded, build_chat_encoder
from unspool.inspection.detokenize import Decoder

TEMPLATES = Path(__file__).parent / "chat_templates"
# Newlines in runs are one token, as in Llama's and Qwen's vocabularies.
_SPLIT = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
_TEXT = (
    "the river runs past an old mill\n\nand nobody\nhas ground any corn since  the war: user assistant system [INST]\n"
)


@dataclass(frozen=True)
class Family:
    template: str
    end: str  # what ends an assistant's turn
    controls: tuple[str, ...]
    special: dict[str, str]
    pieces: bool = False  # a vocabulary of pieces with ▁ for spaces, as SentencePiece makes it
    strips: bool = False  # the template strips messages
    lead: str = ""  # what the template writes between the prompt and the words

    def trained(self, message: Message) -> str:
        """What of an assistant's message is to be trained on."""
        text = self.lead + (message.content.strip() if self.strips else message.content) + self.end
        return text.replace("▁", " ") if self.pieces else unicodedata.normalize("NFC", text)


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "llama3": Family(
        "llama3",
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        strips=True,
    ),
    "qwen2.5": Family("qwen2.5", "<|im_end|>", _CHATML, {"eos_token": "<|im_end|>"}),
    "smollm2": Family("smollm2", "<|im_end|>", _CHATML, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}),
    "mistral": Family(
        "mistral", "</s>", ("<s>", "</s>"), {"bos_token": "<s>", "eos_token": "</s>"}, pieces=True, lead=" "
    ),
    "gemma": Family(
        "gemma",
        "<end_of_turn>",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        {"bos_token": "<bos>", "eos_token": "<eos>"},
        pieces=True,
        strips=True,
    ),
}
# Not separate families, but template styles of some.
VARIANTS = {
    "marked": Family("marked", "<|im_end|>", _CHATML, {"eos_token": "<|im_end|>"}),
    "mistral-system-last": Family(
        "mistral-system-last", "</s>", ("<s>", "</s>"), {"bos_token": "<s>", "eos_token": "</s>"}, True, True, " "
    ),
    "reasoning": Family("reasoning", "<|im_end|>", _CHATML, {"eos_token": "<|im_end|>"}),
}


@lru_cache
def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    family = (FAMILIES | VARIANTS)[name]
    backend = _pieces(legacy=name.startswith("mistral")) if family.pieces else _bytes()
    backend.add_special_tokens([AddedToken(control, special=True, normalized=False) for control in family.controls])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **family.special)
    tokenizer.chat_template = (TEMPLATES / f"{family.template}.jinja").read_text()
    return tokenizer


@lru_cache
def chat_encoder(name: str) -> ChatEncoder:
    return build_chat_encoder(chat_tokenizer(name), None, source=name)


def runs(name: str, encoded: Encoded) -> list[str]:
    """The text of each unbroken run of trained tokens, put together from the tokens' bytes."""
    decoder = Decoder(chat_tokenizer(name), bos=None, eos=None)
    changes = np.flatnonzero(np.diff(encoded.loss_mask.astype(np.int8))) + 1
    parts = zip(np.split(encoded.tokens, changes), np.split(encoded.loss_mask, changes), strict=True)
    trained = [tokens for tokens, mask in parts if len(mask) and mask[0]]
    return [b"".join(decoder.bytes_of(int(token)) for token in tokens).decode() for tokens in trained]


def _bytes() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_SPLIT, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [_TEXT * 5], trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    )
    return backend


def _pieces(*, legacy: bool) -> Tokenizer:
    """As Llama 2 and Mistral (`legacy`: every stretch between control tokens begins with ▁), or as Gemma."""
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator([_TEXT.replace(" ", "▁") * 3], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *(name for name in learnt["vocab"] if name != "\n")]
    merges = [tuple(pair) for pair in learnt["merges"] if "\n" not in "".join(pair)]
    vocabulary = {name: number for number, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if legacy else spaces
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend
