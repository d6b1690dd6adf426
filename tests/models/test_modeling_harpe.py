"""The modelling file of an export with a base per head: what plain `transformers` makes of it, without us."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from factory import CPU, build_model, build_tokenizer, random_tokens
from unspool.models import modeling_harpe
from unspool.models.export import save_model
from unspool.models.generation.greedy import answer
from unspool.models.load import load_model
from unspool.models.rotary import apply_head_bases

CHILD = Path(__file__).with_name("harpe_child.py")
NUM_TOKENS, START, NEW = 40, 12, 16
LAYERS = 3
# Family, and whether layers differ in their bases.
COMMON = [("llama", False), ("llama-mha", True), ("qwen2", True), ("qwen3", False), ("mistral", False)]
# Families of `transformers`, and what they need besides the tests' shape.
MORE: dict[str, dict[str, Any]] = {
    "llama-tied": {},
    "Olmo2": {},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 64},
    "Granite": {},
    "Phi3": {"pad_token_id": 0},
    "Starcoder2": {},
    "StableLm": {"partial_rotary_factor": 0.5},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}


def bases_for(model: Any, *, by_layer: bool) -> np.ndarray:
    spread = np.linspace(5e5, 1e3, model.config.num_key_value_heads)
    return np.stack([np.roll(spread, layer) for layer in range(LAYERS)]) if by_layer else spread


def write(folder: Path, family: str, changes: dict[str, Any], *, by_layer: bool) -> dict[str, Any]:
    """Export a model with a base per head, with the questions of harpe_child.py beside it; our answers to them."""
    model = build_model(family, num_hidden_layers=LAYERS, max_position_embeddings=4096, **changes)
    apply_head_bases(model, bases_for(model, by_layer=by_layer))
    save_model(model, build_tokenizer(), folder, dtype=torch.float32)
    ids, far = random_tokens(NUM_TOKENS), torch.arange(NUM_TOKENS)[None] * 100
    # Capped scores, as Gemma 2 has them, are not for SDPA.
    without = [] if model._supports_sdpa else ["sdpa"]
    torch.save({"ids": ids, "far": far, "start": START, "new": NEW, "without": without}, folder / "asked.pt")
    numbers = ids[0].numpy()
    with torch.no_grad():
        return {
            "without": without,
            "near": model(ids).logits,
            "far": model(ids, position_ids=far).logits,
            "generated": answer(
                model, numbers[: START - 1], [numbers[START - 1 : START]], max_new_tokens=NEW, stop_ids=()
            )[0],
        }


class Exports:
    """Folders of several families, our answers, and those of one process that knows nothing of us."""

    def __init__(self, folder: Path, asked: list[tuple[str, bool]]) -> None:
        self.ours = {
            (family, by_layer): write(folder / f"{family}-{by_layer}", family, MORE.get(family, {}), by_layer=by_layer)
            for family, by_layer in asked
        }
        folders = [folder / f"{family}-{by_layer}" for family, by_layer in self.ours]
        environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-P", str(CHILD), *map(str, folders)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self.loaded_of_ours = json.loads(done.stdout.splitlines()[-1])
        self.theirs = {key: torch.load(path / "told.pt") for key, path in zip(self.ours, folders, strict=True)}
        self.folders = dict(zip(self.ours, folders, strict=True))

    def check(self, family: str, by_layer: bool) -> None:
        ours, theirs = self.ours[family, by_layer], self.theirs[family, by_layer]
        assert not torch.allclose(ours["near"], ours["far"], atol=1e-2), "positions do not count, so this shows nothing"
        for attention in {"sdpa", "eager"} - set(ours["without"]):
            torch.testing.assert_close(theirs[attention], ours["near"], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(theirs[f"{attention} far"], ours["far"], rtol=1e-4, atol=1e-4)
            assert theirs[f"{attention} generated"] == ours["generated"]
            assert theirs[f"{attention} generated after padding"] == ours["generated"]
        assert theirs["static"] == ours["generated"]
        torch.testing.assert_close(theirs["saved again"], ours["near"], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    return Exports(tmp_path_factory.mktemp("harpe"), COMMON)


@pytest.mark.parametrize(("family", "by_layer"), COMMON)
def test_a_fresh_process_computes_and_generates_the_same(exports, family, by_layer):
    exports.check(family, by_layer)


def test_that_process_has_nothing_of_ours(exports):
    assert exports.loaded_of_ours == []


def test_without_remote_code_loading_is_refused_and_says_why(exports):
    for told in exports.theirs.values():
        assert "contains custom code" in told["refusal"]
        assert "trust_remote_code=True" in told["refusal"]


def test_it_is_the_architecture_s_own_class(exports):
    assert exports.theirs["qwen3", False]["class"][:3] == ["HarpeForCausalLM", "_HeadBases", "Qwen3ForCausalLM"]


def test_saved_again_by_its_user_it_still_passes_for_nothing_else(exports):
    for folder in exports.folders.values():
        first, again = (json.loads((path / "config.json").read_text()) for path in (folder, folder / "again"))
        for key in ("model_type", "plain_type", "head_bases", "auto_map", "architectures"):
            assert again[key] == first[key]
        assert (folder / "again" / "modeling_harpe.py").read_text() == (folder / "modeling_harpe.py").read_text()


def test_we_load_it_back_without_remote_code(exports):
    for key, folder in exports.folders.items():
        for place in (folder, folder / "again"):
            again = load_model(str(place), device=CPU, dtype=torch.float32)
            with torch.no_grad():
                torch.testing.assert_close(again(random_tokens(NUM_TOKENS)).logits, exports.ours[key]["near"])


@pytest.mark.slow
def test_other_families_too(tmp_path):
    exports = Exports(tmp_path, [(family, by_layer) for family in MORE for by_layer in (False, True)])
    for key in exports.ours:
        exports.check(*key)


# The file itself


def test_it_imports_nothing_of_ours_and_says_its_licence():
    text = Path(modeling_harpe.__file__).read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"shutil", "sys", "functools", "pathlib", "typing", "torch", "transformers"}
    assert "Apache License, Version 2.0" in "\n".join(text.splitlines()[:3])


def test_nothing_but_its_code_can_tell_what_it_is(tmp_path):
    write(tmp_path, "llama", {}, by_layer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("auto_map")
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ValueError, match=r"unspool_harpe.*does not recognize this architecture"):
        AutoConfig.from_pretrained(tmp_path)
    # llama.cpp's converter goes by this name alone, and vLLM by both.
    assert config["architectures"] == ["HarpeForCausalLM"]
    assert not modeling_harpe.HarpeForCausalLM.is_backend_compatible()


def plain_copy(bases: Any, **changes: Any) -> Any:
    config = build_model(num_hidden_layers=LAYERS, attention="eager").config.to_dict()
    config |= {"plain_type": "llama", "head_bases": bases} | changes
    return modeling_harpe.HarpeForCausalLM._from_config(modeling_harpe.HarpeConfig.from_dict(config))


@pytest.mark.parametrize("bases", [[1e4], [1e4, 1e5, 1e6], [[1e4, 1e5]], [[1e4, 1e5], [1e4], [1e4, 1e5]]])
def test_a_wrong_number_of_bases_is_refused(bases):
    with pytest.raises(ValueError, match="head_bases"):
        plain_copy(bases)


def test_frequencies_stay_exact_when_the_model_is_cast():
    model = plain_copy([1e4, 5e5]).to(torch.bfloat16)
    angles = model.model.layers[0].self_attn.head_angles(torch.tensor([[0, 1, 100_000]]))
    assert angles.dtype == torch.float32
    exact = 100_000 * 5e5 ** -(np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(angles[0, 1, 2].numpy(), exact, rtol=1e-6)


def test_other_models_of_the_same_family_are_left_as_they_are():
    tokens, plain = random_tokens(NUM_TOKENS), build_model(attention="eager")
    with torch.no_grad():
        before = plain(tokens).logits
        plain_copy([1e4, 5e5])(tokens)
        assert torch.equal(plain(tokens).logits, before)


def test_an_attention_that_gets_its_positions_otherwise_is_refused():
    model = plain_copy([1e4, 5e5])
    attention = model.model.layers[0].self_attn
    with pytest.raises(RuntimeError, match="in an unknown way"):
        attention(torch.zeros(1, 3, 32), position_embeddings=(torch.ones(1, 3, 8), torch.zeros(1, 3, 8)))
