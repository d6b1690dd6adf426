"""Averages of weights: against plain Python, at both ends, across shards, types and added tokens; and refusals."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from factory import CPU, build_model, build_tokenizer, random_tokens, save_folder
from unspool.cli.main import build_app
from unspool.core.artifacts import find_damage, read_manifest
from unspool.core.errors import ConfigError
from unspool.models import export as export_module
from unspool.models import merge as merge_module
from unspool.models.export import save_model
from unspool.models.load import fit_vocabulary, load_model
from unspool.models.merge import average, merge
from unspool.models.rotary import apply_rope
from unspool.rope.harpe import HARPE
from unspool.rope.methods import ABF


def saved(folder: Path, seed: int = 0, *, family: str = "llama", dtype=torch.float32, rope=None, **changes) -> Path:
    model = build_model(family, seed=seed, **changes)
    if rope is not None:
        apply_rope(model, rope, 256)
    save_model(model, build_tokenizer(), folder, dtype=dtype)
    return folder


@pytest.fixture
def pair(tmp_path):
    """An extended model and its base."""
    return saved(tmp_path / "longer", 1, rope=ABF(base=1e5)), saved(tmp_path / "base", 2)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def run(*words):
    return CliRunner().invoke(build_app(), ["merge", *map(str, words)])


def rounded(value: float) -> float:
    """The nearest float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


@pytest.mark.parametrize("weight", [0.9, 0.5, 1 / 3])
def test_the_average_is_that_of_plain_python(weight):
    first, second = (torch.randn(7, 5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))

    found = average(first, second, weight, [])

    rows = zip(first.tolist(), second.tolist(), strict=True)
    wanted = [[rounded(weight * a + (1 - weight) * b) for a, b in zip(*row, strict=True)] for row in rows]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=3e-7, atol=1e-8)


def test_bf16_is_averaged_in_fp32_and_rounded_once():
    first, second = torch.full((64,), 3.0, dtype=torch.bfloat16), torch.linspace(2, 5, 64).bfloat16()
    exact = 0.9 * first.double() + 0.1 * second.double()
    half_step = 2**-7 + 1e-6  # neighbors between 2 and 4 are 2⁻⁶ apart

    found = average(first, second, 0.9, [])

    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= half_step
    assert ((0.9 * first + 0.1 * second).double() - exact).abs().max() > half_step, "sums in bf16 would have passed"


@pytest.mark.parametrize(("weight", "side"), [(1.0, 0), (0.0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_of_one_or_zero_gives_one_side_bit_by_bit(weight, side, dtype, tmp_path):
    folders = saved(tmp_path / "a", 1, dtype=dtype, rope=ABF(base=1e5)), saved(tmp_path / "b", 2, dtype=dtype)

    merge(*folders, weight=weight, out=tmp_path / "out")

    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folders[side] / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "config.json").read_text() == (folders[0] / "config.json").read_text()


def test_signs_of_zero_survive_a_weight_of_one():
    first, second = torch.tensor([-0.0, 0.0]), torch.tensor([1.0, -1.0])

    assert torch.signbit(average(first, second, 1.0, [])).tolist() == [True, False]


def test_a_model_merged_with_itself_stays_and_the_order_only_swaps_the_weight(pair, tmp_path):
    longer, base = pair
    merge(longer, longer, weight=0.5, out=tmp_path / "self")
    merge(longer, base, weight=0.25, out=tmp_path / "one")
    merge(base, longer, weight=0.75, out=tmp_path / "two")

    before, itself, one, two = (
        tensors(each) for each in (longer, tmp_path / "self", tmp_path / "one", tmp_path / "two")
    )
    assert all(torch.equal(before[name], itself[name]) for name in before)
    for name in before:
        torch.testing.assert_close(one[name], two[name], rtol=1e-6, atol=1e-8)
        assert not torch.equal(one[name], before[name])


def test_the_merged_folder_computes_what_a_model_with_averaged_weights_computes(pair, tmp_path):
    found = merge(*pair, weight=0.9, out=tmp_path / "out")

    reference = load_model(str(pair[0]), device=CPU, dtype=torch.float32)
    other = build_model(seed=2).state_dict()
    with torch.no_grad():
        for name, tensor in reference.state_dict().items():
            tensor.copy_(0.9 * tensor + 0.1 * other[name])
        plain, ours = (
            AutoModelForCausalLM.from_pretrained(found.folder).eval(),
            load_model(str(found.folder), device=CPU, dtype=torch.float32),
        )
        tokens = random_tokens(200)
        for each in (plain, ours):
            torch.testing.assert_close(each(tokens).logits, reference(tokens).logits, rtol=1e-4, atol=1e-5)
    assert plain.config.rope_parameters["rope_theta"] == 1e5 and plain.config.max_position_embeddings == 256
    assert (
        AutoTokenizer.from_pretrained(found.folder)("the mill")["input_ids"]
        == build_tokenizer()("the mill")["input_ids"]
    )


def test_shards_of_either_side_are_read_and_those_of_the_first_are_written(pair, tmp_path, monkeypatch):
    merge(*pair, weight=0.9, out=tmp_path / "whole")
    monkeypatch.setattr(export_module, "SHARD_SIZE", "20KB")
    sharded = saved(tmp_path / "sharded", 1, rope=ABF(base=1e5))

    merge(sharded, pair[1], weight=0.9, out=tmp_path / "out")

    whole, found = tensors(tmp_path / "whole"), tensors(tmp_path / "out")
    assert whole.keys() == found.keys() and all(torch.equal(whole[name], found[name]) for name in whole)
    index, own = (
        json.loads((each / "model.safetensors.index.json").read_text()) for each in (tmp_path / "out", sharded)
    )
    assert index["weight_map"] == own["weight_map"]
    assert index["metadata"]["total_size"] == own["metadata"]["total_size"]
    load_model(str(tmp_path / "out"), device=CPU, dtype=torch.float32)


def test_one_tensor_of_each_side_is_in_memory_at_a_time(pair, tmp_path, monkeypatch):
    alive, most = [], []
    plain = merge_module.average

    def counting(first, second, *rest):
        import weakref

        alive[:] = [each for each in alive if each() is not None]
        alive.extend(weakref.ref(tensor) for tensor in (first, second))
        most.append(len(alive))
        return plain(first, second, *rest)

    monkeypatch.setattr(merge_module, "average", counting)
    merge(*pair, weight=0.9, out=tmp_path / "out")

    assert len(most) > 10 and max(most) <= 4  # the tensors being averaged, and those before them


def test_tokens_that_only_the_first_model_has_keep_their_embeddings(pair, tmp_path):
    tokenizer, model = build_tokenizer(), build_model(seed=1)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<knot {number}>" for number in range(40)]})
    new = {tokenizer.convert_tokens_to_ids(f"<knot {number}>") for number in range(40)}
    rows = model.get_input_embeddings().weight.shape[0]
    fit_vocabulary(model, new, np.arange(200))
    assert min(new) < rows < max(new), "some in spare rows, some in new ones"
    save_model(model, tokenizer, tmp_path / "knots", dtype=torch.float32)

    found = merge(tmp_path / "knots", pair[1], weight=0.9, out=tmp_path / "out")

    before, other, after = tensors(tmp_path / "knots"), tensors(pair[1]), tensors(tmp_path / "out")
    assert found.own_tokens == 40
    old = [row for row in range(rows) if row not in new]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(after[name][sorted(new)], before[name][sorted(new)])
        torch.testing.assert_close(after[name][old], 0.9 * before[name][old] + 0.1 * other[name][old])
    with pytest.raises(ConfigError, match=r"tokenizers .* give other tokens"):
        merge(pair[1], tmp_path / "knots", weight=0.9, out=tmp_path / "swapped")


def test_a_base_per_head_is_kept_and_still_needs_its_code(pair, tmp_path):
    harpe = saved(tmp_path / "harpe", 1, rope=HARPE(low=1e4, high=1e5))

    found = merge(harpe, pair[1], weight=0.9, out=tmp_path / "out")

    assert (found.rope, found.same_rope) == ("a base per head, 10000 to 1e5", False)
    model = load_model(str(found.folder), device=CPU, dtype=torch.float32)
    assert model.config.head_bases == [1e5, 1e4]
    assert (found.folder / "modeling_harpe.py").is_file()


def test_the_rope_of_both_sides_is_reported_and_a_shorter_context_is_warned_about(pair, tmp_path, caplog):
    found = merge(*pair, weight=0.9, out=tmp_path / "one")
    assert (found.rope, found.second_rope, found.same_rope) == ("base 1e5", "base 10000", False)
    assert found.context_length == 256 and "shorter context" not in caplog.text

    merge(*reversed(pair), weight=0.9, out=tmp_path / "two")
    assert "has the shorter context (64, and" in caplog.text


def test_the_command_prints_which_rope_is_kept(pair, tmp_path):
    done = run(*pair, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    for words in ("RoPE of A, kept: base 1e5, context length 256", "RoPE of B, not used: base 10000", "Merged: "):
        assert words in done.stdout

    found = json.loads(run(*pair, "--out", tmp_path / "out", "--weight", "0.25", "--json").stdout)
    assert (found["weight"], found["rope"], found["folder"]) == (0.25, "base 1e5", str(tmp_path / "out"))
    assert read_manifest(tmp_path / "out")["settings"] == {"weight": 0.25}
    assert find_damage(tmp_path / "out") is None


def test_a_merged_folder_that_was_damaged_is_not_loaded(pair, tmp_path):
    merge(*pair, weight=0.9, out=tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    with pytest.raises(ConfigError, match="has changed since it was written"):
        load_model(str(tmp_path / "out"), device=CPU, dtype=torch.float32)


# Refusals


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}, "num_attention_heads is 4 and 2"),
        ({"family": "mistral"}, "different architectures: .* is"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 2 and 3"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 1e-06 and 0.001"),
        ({"vocab_size": 301}, r"lm_head.weight has shape \(300, 32\).*\(301, 32\)"),
    ],
)
def test_other_architectures_and_shapes_are_refused(changes, wanted, pair, tmp_path):
    other = saved(tmp_path / "other", 2, **changes)

    with pytest.raises(ConfigError, match=wanted):
        merge(pair[0], other, weight=0.9, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_is_refused_though_shapes_agree(pair, tmp_path):
    file = pair[1] / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))

    done = run(*pair, "--out", tmp_path / "out")
    assert done.exit_code == 2 and "tokenizers of" in done.stderr and "Traceback" not in done.output


def test_weights_that_are_not_finite_are_refused_and_nothing_is_published(pair, tmp_path):
    model = build_model(seed=2)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    save_model(model, build_tokenizer(), tmp_path / "broken", dtype=torch.float32)

    with pytest.raises(ConfigError, match=r"average of model\.layers\.1\.mlp\.up_proj\.weight is not finite"):
        merge(pair[0], tmp_path / "broken", weight=0.9, out=tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"longer", "base", "broken"}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--weight", "1.5"], "is not between 0 and 1; give the share"),
        (["--weight", "nan"], "is not between 0 and 1"),
        (["--out", "base"], "exists and is not a merge of Unspool"),
    ],
)
def test_what_is_asked_wrongly_is_one_sentence(words, wanted, pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in pair[1].iterdir())

    done = run(*pair, "--out", "out", *words)

    assert done.exit_code == 2 and wanted in done.stderr and "Traceback" not in done.output
    assert not (tmp_path / "out").exists() and sorted(path.name for path in pair[1].iterdir()) == before


def test_a_model_that_does_not_exist_is_refused_by_its_name(pair, tmp_path):
    done = run(pair[0], tmp_path / "nothing", "--out", tmp_path / "out")

    assert done.exit_code == 2 and "nothing" in done.stderr and "no such file or folder" in done.stderr


def test_a_model_without_rope_is_refused_before_anything_is_written(pair, tmp_path):
    for name in ("one", "two"):
        save_folder(tmp_path / name, GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)))

    with pytest.raises(ConfigError, match="'gpt2' has no RoPE base"):
        merge(tmp_path / "one", tmp_path / "two", weight=0.9, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_quantized_weights_are_refused(pair, tmp_path):
    file = pair[1] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}}))

    with pytest.raises(ConfigError, match="its weights are quantized"):
        merge(*pair, weight=0.9, out=tmp_path / "out")


def test_a_folder_saved_by_a_user_is_merged_too(pair, tmp_path):
    folder = save_folder(tmp_path / "saved", build_model(seed=3))

    found = merge(folder, pair[1], weight=0.9, out=tmp_path / "out")

    assert found.tensors == len(tensors(pair[1]))
