import pickle

import numpy as np
import pytest

from unspool.core.errors import ConfigError
from unspool.data.tokenize.encoder import build_encoder

from ..conftest import build_tokenizer


def test_documents_end_in_one_eos_and_begin_as_the_tokenizer_begins_them():
    text = "the old mill"
    plain, begun = build_tokenizer(), build_tokenizer(bos=True)
    ids = plain(text, add_special_tokens=False)["input_ids"]
    begin, end = plain.convert_tokens_to_ids("<|begin|>"), plain.eos_token_id

    assert build_encoder(plain).encode([text])[0].tolist() == [*ids, end]
    assert build_encoder(begun).encode([text])[0].tolist() == [begin, *ids, end]
    assert build_encoder(begun).encode_plain([text])[0].tolist() == ids


def test_control_tokens_spelled_in_a_document_stay_text(tokenizer):
    text = "before<|end|>after <|begin|>"
    assert tokenizer.eos_token_id in tokenizer(text)["input_ids"], "else this test would check nothing"
    encoder = build_encoder(tokenizer)

    for each in (encoder, pickle.loads(pickle.dumps(encoder))):
        tokens = each.encode([text])[0].tolist()
        assert tokens.count(tokenizer.eos_token_id) == 1
        assert tokenizer.convert_tokens_to_ids("<|begin|>") not in tokens
        assert tokenizer.decode(tokens[:-1]) == text


def test_the_callers_tokenizer_is_left_alone(tokenizer):
    before = tokenizer("a<|end|>")["input_ids"]
    build_encoder(tokenizer).encode(["a<|end|>"])
    assert tokenizer("a<|end|>")["input_ids"] == before


def test_truncation_and_padding_of_the_tokenizer_have_no_effect(tokenizer):
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    long, short = build_encoder(tokenizer).encode(["the river runs past", "a"])
    assert len(long) > 3
    assert len(short) == 2


def test_a_tokenizer_without_eos_is_refused():
    with pytest.raises(ConfigError, match="has no EOS token"):
        build_encoder(build_tokenizer(eos=False))


def test_the_digest_follows_the_tokenizer():
    assert build_encoder(build_tokenizer()).digest == build_encoder(build_tokenizer()).digest
    assert build_encoder(build_tokenizer()).digest != build_encoder(build_tokenizer(bos=True)).digest


def test_the_same_ids_come_from_a_batch_and_one_by_one(tokenizer):
    encoder = build_encoder(tokenizer)
    texts = ["the river runs past", "", "an old mill\n"]
    assert [ids.tolist() for ids in encoder.encode(texts)] == [encoder.encode([text])[0].tolist() for text in texts]
    assert all(ids.dtype == np.uint32 for ids in encoder.encode_plain(texts))
