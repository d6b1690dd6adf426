import json
import subprocess
import sys
from importlib.resources import files

import pytest
from transformers import AutoTokenizer

from factory import build_tokenizer
from unspool.model.tokenizer import load_tokenizer

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


def test_the_shipped_tokenizer_loads_without_torch():
    code = f"""
import sys
from unspool.model.tokenizer import load_tokenizer
assert load_tokenizer({SHIPPED!r}).eos_token_id is not None
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
