import json
import struct
import subprocess
import sys
from importlib.resources import files

import pytest
import transformers
from transformers import AutoTokenizer

from factory import build_tokenizer
from unspool.core.errors import ConfigError
from unspool.models import tokenizer as tokenizer_module
from unspool.models.tokenizer import header_text, load_tokenizer

SHIPPED = str(files("unspool") / "assets" / "tiny-base")


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", None])
def test_the_short_way_gives_the_same_tokenizer_as_transformers(tmp_path, named):
    build_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("tokenizer_class", None)
    path.write_text(json.dumps(settings | ({"tokenizer_class": named} if named else {})))

    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)

    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert type(ours) is type(theirs)


@pytest.mark.skipif(
    transformers.__version__.startswith("5.17."), reason="transformers 5.17 imports torch with its tokenizers"
)
def test_the_shipped_tokenizer_loads_without_torch():
    code = f"""
import sys
from unspool.core.errors import ConfigError
from unspool.models import tokenizer as tokenizer_module
from unspool.models.tokenizer import header_text
from unspool.models.tokenizer import load_tokenizer
assert load_tokenizer({SHIPPED!r}).eos_token_id is not None
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# GGUF


def gguf_header(fields: dict[str, object], *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    """As the format lays it out: texts, numbers, and lists of them."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def content(value: object) -> tuple[int, bytes]:
        if isinstance(value, str):
            return 8, text(value)
        if isinstance(value, list):
            kinds = [content(each) for each in value]
            return 9, struct.pack("<IQ", kinds[0][0], len(kinds)) + b"".join(each for _, each in kinds)
        return 4, struct.pack("<I", value)

    body = b""
    for key, value in fields.items():
        kind, stored = content(value)
        body += text(key) + struct.pack("<I", kind) + stored
    return struct.pack("<4sIQQ", magic, version, 0, len(fields)) + body


FIELDS = {"general.name": "möwe", "numbers": [1, 2, 3], "words": ["a", "bc", ""], "nested": [["x"], ["y", "z"]], "n": 7}


def test_a_text_is_found_in_a_gguf_header_behind_values_of_every_kind(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_header(FIELDS | {"tokenizer.ggml.pre": "smollm"}) + b"tensors")

    assert header_text(path, "tokenizer.ggml.pre") == "smollm"
    assert header_text(path, "general.name") == "möwe"
    assert header_text(path, "n") is None
    assert header_text(path, "tokenizer.ggml.model") is None


@pytest.mark.parametrize("content", [b"", b"GGUF", gguf_header(FIELDS)[:-12], gguf_header(FIELDS, magic=b"GGML")])
def test_a_damaged_gguf_header_is_refused(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"GGUF|damaged"):
        header_text(path, "tokenizer.ggml.pre")


@pytest.mark.parametrize("kind", ["smollm", "llama-bpe", None])
def test_digits_are_taken_one_by_one_where_a_gguf_file_says_so(kind, tmp_path, monkeypatch):
    """The conversion of `transformers` is replaced by a tokenizer that, as its own does, lacks that step."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_header({"tokenizer.ggml.pre": kind} if kind else {"n": 7}))
    converted = build_tokenizer()
    loader = type("Loader", (), {"from_pretrained": lambda **_: converted})
    monkeypatch.setattr(tokenizer_module, "_loader", lambda ref: loader)

    tokenizer = load_tokenizer(str(path))

    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    expected = ["a", "ĠĠ", "1", "2"] if kind == "smollm" else ["a", "Ġ", "Ġ12"]
    assert [piece for piece, _ in pieces] == expected
    assert tokenizer.decode(tokenizer("a  12").input_ids) == "a  12"
