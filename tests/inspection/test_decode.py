"""Tokens convert to text exactly, and split characters are marked."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from inspection_factory import byte_tokenizer
from unspool.data.tokenize.encoder import build_encoder
from unspool.inspection.detokenize import Decoder

ODD = "a日本é👩‍👩‍👧 שלום\x00\t\r\n end"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(byte_tokenizer(), bos=None, eos=None)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    (encoded,) = build_encoder(byte_tokenizer()).encode_plain([ODD])
    assert len(encoded) > len(ODD), "every character is one token, so nothing can be cut"
    return encoded


def test_tokens_give_back_their_text(decoder, tokens):
    assert decoder.text(tokens) == ODD


def test_runs_of_any_cut_add_up_to_the_text_and_keep_characters_whole(decoder, tokens):
    for first in range(len(tokens) + 1):
        for second in range(first, len(tokens) + 1):
            texts = decoder.texts(np.split(tokens, [first, second]))
            assert "".join(texts) == ODD
            assert "\ufffd" not in "".join(texts)


def test_a_character_cut_off_at_an_end_shows_as_a_replacement(decoder):
    (encoded,) = build_encoder(byte_tokenizer()).encode_plain(["x日y"])
    assert decoder.text(encoded[:-2]) == "x\ufffd"
    assert decoder.text(encoded[2:]) == "\ufffd\ufffdy"
    assert decoder.texts([encoded[:-2]]) == ["x\ufffd"]


def test_a_control_token_between_keeps_both_halves_apart(decoder):
    (encoded,) = build_encoder(byte_tokenizer()).encode_plain(["日"])
    end = decoder.id_of("<|end|>")
    runs = [encoded[:1], np.array([end], dtype=np.uint32), encoded[1:]]
    assert decoder.texts(runs) == ["\ufffd", "<|end|>", "\ufffd\ufffd"]


def test_random_bytes_decode_as_python_decodes_them(decoder):
    rng = np.random.default_rng(0)
    single = {decoder.bytes_of(token): token for token in range(290) if len(decoder.bytes_of(token)) == 1}
    assert len(single) == 256
    for _ in range(50):
        data = rng.integers(256, size=30, dtype=np.uint8).tobytes()
        ids = np.array([single[data[at : at + 1]] for at in range(len(data))], dtype=np.uint32)
        assert decoder.text(ids) == data.decode("utf-8", "replace")


def test_an_id_beyond_the_vocabulary_shows_its_number(decoder):
    assert decoder.text(np.array([99_999], dtype=np.uint32)) == "⟨id 99999⟩"


def test_a_border_within_a_character_moves_behind_it(decoder):
    (encoded,) = build_encoder(byte_tokenizer()).encode_plain(["x日y"])
    assert [decoder.next_border(encoded, at) for at in range(5)] == [0, 1, 4, 4, 4]


def test_byte_fallback_vocabularies_are_spelled_too():
    vocabulary = {"<unk>": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "▁the": 4, "mill": 5}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    decoder = Decoder(PreTrainedTokenizerFast(tokenizer_object=backend), bos=None, eos=None)
    assert decoder.text(np.array([5, 4, 1, 2, 3])) == "mill the€"
