"""The check of an export finds what it is there to find. The other side is computed here, as it does it elsewhere."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import dynamic_module_utils
from transformers.models.llama import modeling_llama

from factory import CPU, build_model, build_tokenizer
from unspool.core.errors import UnspoolError
from unspool.models import export, plain_logits
from unspool.models.export import TOLERANCE, check_folder, our_passes, round_weights, save_model
from unspool.models.rotary import apply_base, apply_head_bases

CONTEXT = 4096


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch, tmp_path):
    monkeypatch.setattr(export, "_run_plain", plain_logits.answers)
    # Each folder's own code is to do all it does, also what it does once for all.
    apply = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", getattr(apply, "plain", apply))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


def exported(folder: Path, bases: Any = None, *, dtype: torch.dtype = torch.float32, **changes: Any) -> list[Any]:
    """Write a model with these bases to `folder`; our passes."""
    model = build_model(max_position_embeddings=CONTEXT, num_hidden_layers=3, **changes)
    if bases is None:
        apply_base(model, 5e5)
    else:
        apply_head_bases(model, np.array(bases))
    round_weights(model, dtype)
    save_model(model, build_tokenizer(), folder, dtype=dtype)
    return our_passes(model, dtype)


def check(folder: Path, passes: list[Any]) -> dict[str, Any]:
    return {one.name: one for one in check_folder(folder, passes, build_tokenizer(), device=CPU)}


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("bases", [None, [1e6, 1e4], [[1e6, 1e4], [1e4, 1e6], [1e6, 1e4]]])
def test_a_right_export_passes_with_room_to_spare(tmp_path, bases):
    checked = check(tmp_path, exported(tmp_path, bases))
    assert list(checked) == ["short", "long", "cached", "far"]
    assert max(one.error for one in checked.values()) < TOLERANCE / 20
    assert checked["far"].last_position == CONTEXT - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_written_in_half_are_compared_as_they_are_written(tmp_path, dtype):
    checked = check(tmp_path, exported(tmp_path, [1e6, 1e4], dtype=dtype))
    name = str(dtype).removeprefix("torch.")
    assert checked["long"].error < TOLERANCE / 20
    assert 0 < checked[f"in {name}"].error < checked[f"in {name}"].tolerance


def test_weights_that_half_cannot_hold_are_noticed(tmp_path):
    passes = exported(tmp_path)
    model = build_model(max_position_embeddings=CONTEXT, num_hidden_layers=3)
    apply_base(model, 5e5)
    save_model(model, build_tokenizer(), tmp_path, dtype=torch.bfloat16)
    with pytest.raises(UnspoolError, match="not the same model"):
        check(tmp_path, passes)


@pytest.mark.parametrize("base", [1e4, 4.9e5])
def test_a_wrong_base_is_caught(tmp_path, base):
    passes = exported(tmp_path)
    change_config(tmp_path, rope_theta=base, rope_parameters={"rope_type": "default", "rope_theta": base})
    with pytest.raises(UnspoolError, match=r"far .* \(at most"):
        check(tmp_path, passes)


@pytest.mark.parametrize(
    "wrong", [[1e4, 1e6], [1e6, 1e6], [1e6, 1.02e4], [[1e6, 1e4], [1e4, 1e6], [1e6, 1e4]]], ids=str
)
def test_bases_permuted_or_wrong_are_caught(tmp_path, wrong):
    passes = exported(tmp_path, [1e6, 1e4])
    change_config(tmp_path, head_bases=wrong)
    with pytest.raises(UnspoolError, match="not the same model"):
        check(tmp_path, passes)


BROKEN = {
    "queries and keys by other bases": (
        "for head in heads)",
        "for head, angles in zip(heads, (angles, angles.flip(1)), strict=True))",
    ),
    "only queries rotated": ("for head in heads)", "for head in heads[:1]) + tuple(heads[1:])"),
    "frequencies in bf16": (").float().to(positions.device)", ").bfloat16().float().to(positions.device)"),
    "tables in bf16": ("angles.cos().unsqueeze", "angles.cos().bfloat16().float().unsqueeze"),
    "positions of the cache forgotten": (
        "return position_ids, None",
        "return position_ids - position_ids[:, :1], None",
    ),
    "query heads beside the wrong KV head": (
        "angles.shape[head_dim], -1, *shape",
        "-1, angles.shape[head_dim], *shape",
    ),
    "bases of the first layer everywhere": ("HeadAngles(of_layer,", "HeadAngles(by_layer[0],"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_code_is_caught(tmp_path, fault):
    # With as many groups as heads in a group, a wrong grouping might pass unseen.
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    bases = [1e6, 1e5, 1e4]
    passes = exported(tmp_path, [np.roll(bases, layer).tolist() for layer in range(3)], **shape)
    path = tmp_path / "modeling_harpe.py"
    right, wrong = BROKEN[fault]
    text = path.read_text()
    assert text.count(right) == 1
    if fault.startswith("query heads"):
        text = text.replace("unsqueeze(head_dim + 1)", "unsqueeze(head_dim)")
    path.write_text(text.replace(right, wrong))
    with pytest.raises(UnspoolError, match="not the same model"):
        check(tmp_path, passes)


def test_another_tokenizer_is_caught(tmp_path):
    passes = exported(tmp_path)
    other = build_tokenizer()
    other.add_tokens([" mill"])
    other.save_pretrained(tmp_path)
    with pytest.raises(UnspoolError, match="other tokens"):
        check(tmp_path, passes)


def test_logits_that_are_no_numbers_do_not_pass(tmp_path):
    passes = exported(tmp_path)
    broken = passes[0].logits * float("nan")
    with pytest.raises(UnspoolError, match="short nan"):
        check(tmp_path, [replace(passes[0], logits=broken)])
