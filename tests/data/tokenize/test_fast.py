"""The fast routes give the ids of `tokenizers`, or are not used, or raise an error."""

import json
import pickle
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import unspool
from unspool.core.errors import ConfigError, DataError
from unspool.data.tokenize import encoder
from unspool.data.tokenize import fast as tokens_engines
from unspool.data.tokenize.encoder import Encoder, choose_route, load_checked, passages
from unspool.data.tokenize.fast import ENGINES, Gigatoken, NotFastError, build_plain, byte_letters

from ..conftest import prose

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TRAINING = [
    prose(800, seed=1),
    "It's 1984, they'll say: 42 mice & 3.14 pies!\n\n\tdef f(x):\n        return x ** 2  # naïve café\n" * 20,
    "Привет, мир! 你好，世界。 こんにちは 👍🏽 ½ m² – “quoted” … שלום\r\n" * 20,
]
# As in SmolLM2, some control characters and the lead bytes of rare planes were never learned.
UNLEARNED = {byte_letters()[byte] for byte in (0x04, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100))}

FRAGMENTS = [
    *("the old mill", " river", "don't", "I'LL ", "it's", "'ſ", "''", "1", "12345", " 7", "3.14", "½", "m²", "٣٤", "Ⅷ"),
    *(" ", "  ", "    ", "\n", "\r\n", "\n\n\n", "\t", "\x00", "\x04", "\x1d", "\x7f", "\u00a0", "\u2028", "\ufeff"),
    *("é", "e\u0301", "\u0301", "\u0338", "Å", "\u212b", "각", "\u1100\u1161\u11a8", "שָׁלוֹם", "नमस्ते", "你好，世界", "ﬁ"),
    *(
        "👩‍👩‍👧‍👦",
        "🇩🇪",
        "👍🏽",
        "\U00050000",
        "\U0010ffff",
        "\u08d3",
        "\u0eba",
        "\U00011de0",
        "..",
        "!?",
        "<",
        "|",
        "**",
    ),
    *("<|end|>", "<|begin|>", "<|end", "|>", "<tool>", "</tool>", "<tool", "<|end|><|end|>", "\\n", "</div>"),
]


def _train(pre_tokenizer, *, missing=frozenset(), normalizer=None, ignore_merges=False, plain_tokens=()) -> str:
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = [letter for letter in byte_letters() if letter not in missing]
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TRAINING, trainer)
    backend.add_tokens([AddedToken(name, normalized=False) for name in plain_tokens])
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<|begin|>", "<|end|>")])
    return backend.to_str()


def _split(pattern):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def _smollm2_like():
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


@cache
def definition_of(kind: str) -> str:
    if kind == "tiny-base":
        return (Path(unspool.__file__).parent / "assets/tiny-base/tokenizer.json").read_text(encoding="utf-8")
    if kind == "llama3-like":
        return _train(_split(LLAMA3), ignore_merges=True)
    if kind == "qwen2-like":
        return _train(_split(QWEN2), normalizer=normalizers.NFC(), plain_tokens=("<tool>", "</tool>"))
    if kind == "smollm2-like":
        return _train(_smollm2_like(), missing=UNLEARNED)
    if kind == "gguf-like":  # what some versions of `transformers` make of SmolLM2's GGUF
        plain = json.loads(_train(_smollm2_like()))
        plain["normalizer"] = {"type": "Sequence", "normalizers": []}
        plain["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<|end|>"}
        return json.dumps(plain)
    assert kind == "own-pattern"
    return _train(_split(r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]| "), plain_tokens=("<tool>",))  # leaves line ends uncovered


def encoder_of(kind: str) -> Encoder:
    return Encoder(definition_of(kind), (), 0)


def covered_texts(kind: str) -> list[str]:
    """Ordinary texts that the pattern of this tokenizer covers."""
    return TRAINING[:1] if kind == "own-pattern" else TRAINING


def random_texts(num: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(num):
        parts = [FRAGMENTS[at] for at in rng.integers(len(FRAGMENTS), size=rng.integers(1, 25))]
        codes = [int(code) for code in rng.integers(0x110000, size=3) if not 0xD800 <= code < 0xE000]
        parts += [*map(chr, codes), *map(chr, rng.integers(0x3000, size=3))]
        rng.shuffle(parts)
        texts.append("".join(parts))
    return texts


GIGATOKEN_KINDS = ["llama3-like", "qwen2-like", "smollm2-like", "gguf-like"]
TIKTOKEN_KINDS = [*GIGATOKEN_KINDS, "tiny-base", "own-pattern"]
ROUTES_AND_KINDS = [
    *(("gigatoken", kind) for kind in GIGATOKEN_KINDS),
    *(("tiktoken", kind) for kind in TIKTOKEN_KINDS),
]


@pytest.fixture
def only_route(monkeypatch):
    """Leaves one route, or puts a made-up one in the place of all."""

    def leave(name, engine=None):
        if engine is None:
            pytest.importorskip(name)
            engine = ENGINES[name]
        for module in (encoder, encoder):
            monkeypatch.setattr(module, "ENGINES", {name: engine})
        load_checked.cache_clear()

    yield leave
    load_checked.cache_clear()


@pytest.mark.parametrize(("route", "kind"), ROUTES_AND_KINDS)
def test_every_route_gives_the_ids_of_tokenizers_on_random_strings(route, kind, only_route):
    only_route(route)
    slow = encoder_of(kind)
    fast = choose_route(slow, covered_texts(kind))
    assert fast.route == route, fast.why
    texts = random_texts(150, seed=len(kind))

    for text, ids, expected in zip(texts, fast.encode_plain(texts), slow.encode_plain(texts), strict=True):
        assert ids.dtype == np.uint32
        assert ids.tolist() == expected.tolist(), repr(text)


@pytest.mark.parametrize(("route", "kind"), ROUTES_AND_KINDS)
def test_common_text_is_not_left_to_the_tokenizer(route, kind, only_route):
    only_route(route)
    engine = load_checked(definition_of(kind), route)
    for text in covered_texts(kind):
        engine.encode(text)
    assert engine.fallback_chars == 0


@pytest.mark.parametrize(("route", "kind"), ROUTES_AND_KINDS)
def test_long_runs_without_spaces_get_the_same_ids(route, kind, only_route):
    only_route(route)
    letters = np.random.default_rng(0).choice(list("abcdefghABCDEFGH+/01"), size=20_000)
    texts = ["a" * 20_000, "".join(letters), " " * 20_000 + "x", "\n" * 20_000, "7" * 20_000, "\x00" * 20_000]
    slow = encoder_of(kind)
    fast = replace(slow, route=route)
    for ids, expected in zip(fast.encode(texts), slow.encode(texts), strict=True):
        assert np.array_equal(ids, expected)


@pytest.mark.parametrize("kind", ["llama3-like", "smollm2-like"])
@pytest.mark.parametrize("route", ["gigatoken", "tiktoken"])
def test_control_tokens_spelled_in_a_document_stay_text_on_every_route(route, kind, only_route):
    only_route(route)
    tokenizer = Tokenizer.from_str(definition_of(kind))
    control = {tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|begin|>")}
    text = "before<|end|>after <|begin|>"
    assert control <= set(tokenizer.encode(text).ids), "else this test would check nothing"

    (ids,) = replace(encoder_of(kind), route=route).encode_plain([text])
    assert not control & set(ids.tolist())
    assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize("route", ["gigatoken", "tiktoken"])
def test_added_tokens_that_are_not_control_tokens_stay_tokens(route, only_route):
    only_route(route)
    tool = Tokenizer.from_str(definition_of("qwen2-like")).token_to_id("<tool>")
    (ids,) = replace(encoder_of("qwen2-like"), route=route).encode_plain(["use <tool> now"])
    assert tool in ids.tolist()


def test_gigatoken_comes_first_and_tiktoken_does_what_it_refuses():
    pytest.importorskip("gigatoken")
    assert choose_route(encoder_of("llama3-like"), TRAINING).route == "gigatoken"
    own = choose_route(encoder_of("tiny-base"), TRAINING)
    assert own.route == "tiktoken"
    assert "not gigatoken: Unknown pre_tokenizer" in own.why


def test_the_route_is_no_part_of_the_digest_and_travels_with_the_encoder():
    slow = encoder_of("llama3-like")
    fast = choose_route(slow, TRAINING)
    assert fast.route != slow.route
    assert fast.digest == slow.digest

    fast.encode(["loads the engine"])
    sent = pickle.dumps(fast)
    assert len(sent) < len(fast.definition.encode()) + 1000
    arrived = pickle.loads(sent)
    assert (arrived.route, arrived.why) == (fast.route, fast.why)
    assert arrived.encode(["the mill"])[0].tolist() == slow.encode(["the mill"])[0].tolist()


class Wrong:
    """gigatoken's place taken by the tokenizer itself, except for some mistakes."""

    def __init__(self, plain):
        self._tokenizer = Tokenizer.from_str(json.dumps(plain.definition))

    def encode(self, text):
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)


class SwapsAtZebra(Wrong):
    def encode(self, text):
        ids = super().encode(text)
        return ids[::-1].copy() if "zebra" in text else ids


class DropsLineEnds(Wrong):
    def encode(self, text):
        return super().encode(text.replace("\n", ""))


class SwapsAtUmlaut(Wrong):
    def encode(self, text):
        ids = super().encode(text)
        return ids[::-1].copy() if "ü" in text else ids


class Refuses(Wrong):
    def encode(self, text):
        raise NotFastError("too hard")


def test_a_mismatch_on_the_sample_rejects_the_route_aloud(only_route, capsys):
    only_route("swift", SwapsAtZebra)
    chosen = choose_route(encoder_of("llama3-like"), ["the mill", "a zebra at the mill"])
    assert chosen.route == "tokenizers"
    assert "not swift: its ids differ on the text that begins 'a zebra at the mill'" in chosen.why
    assert chosen.why in capsys.readouterr().err


def test_a_mismatch_outside_the_sample_stops_the_run(only_route, monkeypatch):
    monkeypatch.setattr(encoder, "_STRIDE", 5000)
    only_route("swift", SwapsAtZebra)
    chosen = choose_route(encoder_of("llama3-like"), ["the mill"])
    assert chosen.route == "swift"
    with pytest.raises(DataError, match="swift and the model's own tokenizer disagree on the passage"):
        chosen.encode(["a zebra at the mill " * 1000])


def test_a_text_that_lost_something_goes_to_the_tokenizer(only_route):
    only_route("swift", DropsLineEnds)
    slow = encoder_of("llama3-like")
    text = "the old\nmill\n"
    (ids,) = replace(slow, route="swift").encode_plain([text])
    assert ids.tolist() == slow.encode_plain([text])[0].tolist()


def test_a_text_with_a_character_that_engines_read_differently_goes_to_the_tokenizer(only_route):
    only_route("swift", SwapsAtUmlaut)
    slow = encoder_of("llama3-like")
    fast = replace(slow, route="swift")
    texts = ["Mühle am Fluß", "the mill", "Fluß"]
    assert [ids.tolist() for ids in fast.encode(texts)] == [ids.tolist() for ids in slow.encode(texts)]
    assert load_checked(fast.definition, "swift").fallback_chars == len(texts[0])


def test_a_route_that_does_too_little_is_not_taken(only_route):
    only_route("swift", Refuses)
    chosen = choose_route(encoder_of("llama3-like"), TRAINING)
    assert chosen.route == "tokenizers"
    assert "not swift: it cannot encode 100% of the sample" in chosen.why


def test_a_missing_package_is_named_and_the_next_route_taken(monkeypatch):
    load_checked.cache_clear()
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    chosen = choose_route(encoder_of("llama3-like"), TRAINING)
    assert chosen.route == "tiktoken"
    assert "the package gigatoken cannot be imported" in chosen.why


def test_a_machine_without_the_chosen_package_is_a_clear_error(monkeypatch):
    load_checked.cache_clear()
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ConfigError, match="install the same packages on every machine"):
        replace(encoder_of("llama3-like"), route="tiktoken").encode(["the mill"])


def test_tokenizers_beyond_byte_level_bpe_are_left_to_the_library(capsys):
    backend = Tokenizer(models.WordLevel({"the": 0, "mill": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    chosen = choose_route(Encoder(backend.to_str(), (), 0), ["the mill"])
    assert chosen.route == "tokenizers"
    assert "tokenizing with the tokenizers library" in capsys.readouterr().err
    assert chosen.encode_plain(["the mill"])[0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lstrip": True}, "include the spaces around them"),
        ({"content": "<tool>more"}, "prefix of another"),
    ],
)
def test_tiktoken_refuses_added_tokens_that_it_would_find_elsewhere(change, reason):
    definition = json.loads(definition_of("qwen2-like"))
    tools = [token for token in definition["added_tokens"] if not token["special"]]
    tools[-1].update(change)
    with pytest.raises(NotFastError, match=reason):
        ENGINES["tiktoken"](build_plain(json.dumps(definition)))


def test_tiktoken_refuses_merges_that_it_would_apply_otherwise():
    definition = json.loads(definition_of("llama3-like"))
    definition["model"]["ignore_merges"] = False
    vocab = definition["model"]["vocab"]
    # "qxz" is only listed as q + xz, but qx is joined first, so its own spelling never leads to it.
    for number, token in enumerate(("qx", "xz", "qxz")):
        vocab[token] = 2000 + number
    definition["model"]["merges"] = [["q", "x"], ["x", "z"], ["q", "xz"]]
    definition["model"]["vocab"] = {token: at for token, at in vocab.items() if len(token) == 1 or at >= 2000}
    with pytest.raises(NotFastError, match="'qxz'"):
        ENGINES["tiktoken"](build_plain(json.dumps(definition)))


def test_gigatoken_starts_afresh_when_it_remembers_too_much(monkeypatch):
    pytest.importorskip("gigatoken")
    engine = Gigatoken(build_plain(definition_of("llama3-like")))
    before, text = engine._tokenizer, TRAINING[0]
    ids = engine.encode(text)
    monkeypatch.setattr(tokens_engines, "_CHECK_EVERY_CHARS", 1)
    engine.encode(text)
    assert engine._tokenizer is before, "it had not grown"
    monkeypatch.setattr(tokens_engines, "_GROWTH_BYTES", -(1 << 50))
    assert engine.encode(text).tolist() == ids.tolist()
    assert engine._tokenizer is not before


def test_passages_follow_from_the_text_alone_and_are_a_small_share():
    long = prose(400_000, seed=2)
    assert list(passages(long)) == list(passages(long))
    assert len(list(passages(long))) in (len(long) >> 20, (len(long) >> 20) + 1)
    assert all(passage in long for passage in passages(long))

    short = [prose(2000, seed=seed) for seed in range(300)]
    chosen = sum(len(list(passages(text))) for text in short)
    expected = sum(map(len, short)) / (1 << 20)
    assert 0 < chosen < 5 * expected
