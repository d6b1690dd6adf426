"""Damaged, contradictory and malicious weights and configs.

Each is a change of a small working folder. A command that reads it prints one sentence and exits with code 2; nothing
is scored, nothing is written, no code of the folder runs.
"""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from unspool.core.artifacts import seal

from .model_folders import TEXT, Damage, check_sentence, content, evaluate, run

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"


# Weight files


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), content[end:]


def write(path: Path, header: dict[str, Any] | str, data: bytes) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def change_header(change: Callable[[dict[str, Any]], None]) -> Damage:
    def damage(folder: Path) -> None:
        header, data = read(folder / WEIGHTS)
        change(header)
        write(folder / WEIGHTS, header, data)

    return damage


def change_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, {"format": "pt"})

    return damage


def change_bytes(change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes())) and None


def repeat_name(folder: Path) -> None:
    header, data = read(folder / WEIGHTS)
    text = json.dumps(header)
    write(folder / WEIGHTS, f"{text[:-1]}, {json.dumps(NORM)}: {json.dumps(header[NORM])}}}", data)


def overlap(header: dict[str, Any]) -> None:
    first, second = (f"model.layers.{layer}.mlp.gate_proj.weight" for layer in (0, 1))
    header[second]["data_offsets"] = header[first]["data_offsets"]


def set_values(name: str, value: float, count: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[name].view(-1)[:count] = value

    return change


def shard(folder: Path) -> dict[str, str]:
    """Split the weights over two files with an index; returns its weight_map."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    files = dict.fromkeys(names[: len(names) // 2], SHARDS[0]) | dict.fromkeys(names[len(names) // 2 :], SHARDS[1])
    for file in SHARDS:
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


def change_index(change: Callable[[Path, dict[str, str]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        changed = change(folder, shard(folder))
        if changed is not None:
            (folder / INDEX).write_text(json.dumps(changed))

    return damage


def move_out(folder: Path, files: dict[str, str]) -> dict[str, Any]:
    (folder / SHARDS[1]).rename(folder.parent / "other.safetensors")
    return {"weight_map": {name: "../other.safetensors" if file == SHARDS[1] else file for name, file in files.items()}}


def move_far(folder: Path, files: dict[str, str]) -> dict[str, Any]:
    other = str((folder / SHARDS[1]).rename(folder.parent / "other.safetensors"))
    return {"weight_map": {name: other if file == SHARDS[1] else file for name, file in files.items()}}


def link_out(folder: Path, files: dict[str, str]) -> None:
    (folder / SHARDS[1]).rename(folder.parent / "other.safetensors")
    (folder / SHARDS[1]).symlink_to(folder.parent / "other.safetensors")


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def pickle_shard(folder: Path, files: dict[str, str]) -> dict[str, Any]:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    return {"weight_map": {name: "pytorch_model.bin" if file == SHARDS[1] else file for name, file in files.items()}}


def swap_shards(folder: Path, files: dict[str, str]) -> dict[str, Any]:
    return {"weight_map": {name: SHARDS[1 - SHARDS.index(file)] for name, file in files.items()}}


def repeat_tensor(folder: Path, files: dict[str, str]) -> None:
    second = load_file(folder / SHARDS[1])
    name = next(name for name, file in files.items() if file == SHARDS[0])
    save_file(second | {name: load_file(folder / SHARDS[0])[name]}, folder / SHARDS[1], {"format": "pt"})


# By name: the damage, and the expected message. Headers and indexes reveal all of these.
FILES: dict[str, tuple[Damage, str]] = {
    "cut short": (change_bytes(lambda content: content[: len(content) // 2]), f"{WEIGHTS} is damaged"),
    "longer": (change_bytes(lambda content: content + b"\0" * 8), f"{WEIGHTS} is damaged"),
    "empty": (change_bytes(lambda content: b""), f"{WEIGHTS} is damaged"),
    "header beyond the file": (change_bytes(lambda content: struct.pack("<Q", 1 << 40) + content[8:]), "damaged"),
    "header is no JSON": (change_bytes(lambda content: content[:8] + b"[" * 50 + content[58:]), "damaged"),
    "an HTML page": (change_bytes(lambda content: b"<!DOCTYPE html><html>503</html>" * 40), "damaged"),
    "a Git LFS pointer": (change_bytes(lambda content: b"version https://git-lfs.github.com/spec/v1\n"), "damaged"),
    "overlapping tensors": (change_header(overlap), "damaged"),
    "a tensor beyond the file": (
        change_header(lambda header: header[NORM].update(data_offsets=[10**9, 10**9 + 128])),
        "damaged",
    ),
    "a shape of another size": (change_header(lambda header: header[NORM].update(shape=[33])), "damaged"),
    "a type of another size": (change_header(lambda header: header[NORM].update(dtype="F64")), "damaged"),
    "a name twice": (repeat_name, f"{NORM!r} is listed twice"),
    "integers": (
        change_weights(lambda weights: weights.update({GATE: weights[GATE].to(torch.int32)})),
        f"{GATE} in {WEIGHTS} has type I32",
    ),
    "float8 without scales": (
        change_weights(lambda weights: weights.update({GATE: weights[GATE].to(torch.float8_e4m3fn)})),
        "has type F8_E4M3",
    ),
    "no file of a shard": (change_index(lambda folder, files: (folder / SHARDS[1]).unlink()), "1 of 2 shards are mis"),
    "shard above the folder": (change_index(move_out), "'../other.safetensors', outside of its folder"),
    "shard at an absolute path": (change_index(move_far), "outside of its folder"),
    "shard linked from outside": (change_index(link_out), "outside of its folder"),
    "pickle in the index": (change_index(pickle_shard), "'pytorch_model.bin', but only .safetensors files are read"),
    "shards exchanged in the index": (change_index(swap_shards), f"{INDEX} lists"),
    "a tensor in two shards": (change_index(repeat_tensor), "is stored both in"),
    "index is a list": (change_index(lambda folder, files: [files]), f"{INDEX} cannot be read"),
    "index without names": (change_index(lambda folder, files: {"weight_map": {}}), f"{INDEX} cannot be read"),
    "index of numbers": (change_index(lambda folder, files: {"weight_map": {NORM: 7}}), f"{INDEX} cannot be read"),
}

# These are seen when the weights are read.
VALUES: dict[str, tuple[Damage, str]] = {
    "NaN": (change_weights(set_values(GATE, float("nan"), 3)), f"NaN or infinite values in {GATE} (3 of 1536)"),
    "infinity": (change_weights(set_values(NORM, float("inf"), 1)), f"NaN or infinite values in {NORM} (1 of 32)"),
    "a missing tensor": (
        change_weights(lambda weights: weights.pop(GATE)),
        f"are missing from its files ({GATE}",
    ),
    "a tensor of another shape": (
        change_weights(lambda weights: weights.update({GATE: weights[GATE][:-1].clone()})),
        f"{GATE} has shape (47, 32) in its file, but the config requires (48, 32)",
    ),
    "pickled weights alone": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin") and None,
        "no file named model.safetensors",
    ),
}


@pytest.mark.parametrize("name", [*FILES, *VALUES])
def test_damaged_weights_are_named_and_not_scored(name, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    damage, said = (FILES | VALUES)[name]
    damage(folder)

    check_sentence(evaluate(folder), said)

    assert not (folder.parent / "scores" / "summary.json").exists()
    assert not Path("ran").exists()


@pytest.mark.parametrize("command", ["rope", "plan", "inspect", "export"])
@pytest.mark.parametrize("name", ["cut short", "pickle in the index", "no file of a shard"])
def test_every_command_that_reads_a_model_checks_its_files(command, name, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    damage, said = FILES[name]
    damage(folder)
    out = folder.parent / "out"
    words = {
        "rope": ("rope", "--model", folder, "--context", "1K"),
        "plan": ("plan", "tiny", "--gpu", "4090", "--model", folder),
        "inspect": ("inspect", "attention", folder, "--text", folder.parent / "text.txt", "--device", "cpu"),
        "export": ("export", folder, out, "--device", "cpu"),
    }

    check_sentence(run(*words[command]), said)

    assert not out.exists()


def test_weights_that_overflow_in_the_exported_type_are_named(folder):
    change_weights(set_values(GATE, 1e30, 2))(folder)

    done = run("export", folder, folder.parent / "out", "--dtype", "fp16", "--device", "cpu")

    check_sentence(done, f"in float16: NaN or infinite values in {GATE} (2 of 1536)")
    assert not (folder.parent / "out").exists()


def test_an_intact_model_is_scored_whole_and_in_shards(folder):
    whole = evaluate(folder)
    shard(folder)

    sharded = evaluate(folder, "again")
    assert (whole.exit_code, sharded.exit_code) == (0, 0), sharded.output
    assert whole.stdout == sharded.stdout


# What we wrote ourselves


@pytest.fixture
def written(folder):
    """The folder as a stage publishes it."""
    (folder.parent / "stage.partial").mkdir()
    folder.rename(folder.parent / "stage.partial" / "model")
    stage = folder.parent / "stage"
    seal(folder.parent / "stage.partial", stage, kind="stage", inputs={}, settings={}, counts={})
    (stage / "text.txt").write_text(TEXT)
    return stage / "model"


def test_one_changed_byte_of_a_model_that_we_wrote_is_found(written):
    assert evaluate(written).exit_code == 0
    content = bytearray((written / WEIGHTS).read_bytes())
    content[-40] ^= 1
    (written / WEIGHTS).write_bytes(content)

    check_sentence(evaluate(written, "again"), f"{WEIGHTS} has changed since it was written")


def test_another_rope_base_in_a_config_that_we_wrote_is_found(written):
    path = written / "config.json"
    path.write_text(path.read_text().replace("10000.0", "50000.0"))

    check_sentence(evaluate(written), "config.json has changed since it was written")


def test_a_file_that_is_gone_from_a_model_that_we_wrote_is_named_without_reading_the_others(written):
    (written / "generation_config.json").unlink()

    check_sentence(run("rope", "--model", written, "--context", "1K"), "generation_config.json is missing")


# Configs


def config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | changes))

    return damage


def rope(**parameters: Any) -> Damage:
    return config(rope_parameters={"rope_type": "default", "rope_theta": 1e4} | parameters)


CODE = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}


def plant_code(folder: Path) -> None:
    config(model_type="evil", auto_map=CODE)(folder)
    (folder / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")


CONFIGS: dict[str, tuple[Damage, str]] = {
    "not JSON": (content("config.json", b'{"model_type": "llama",'), "config could not be read"),
    "not text": (content("config.json", b"\xff\xfe\x00"), "config could not be read"),
    "a list": (content("config.json", b"[]"), "config.json holds a list"),
    "nested without end": (content("config.json", b"[" * 100_000), "config could not be read"),
    "an unknown architecture": (config(model_type="evil"), "evil"),
    "code of its own": (plant_code, "custom code"),
    "fewer layers than weights": (config(num_hidden_layers=1), "its config does not use 9 of its weights"),
    "more layers than weights": (config(num_hidden_layers=3), "weights are missing from its files"),
    "other sizes": (config(hidden_size=64, head_dim=8), "but the config requires"),
    "a smaller vocabulary": (
        config(vocab_size=299),
        "shape (300, 32) in its file, but the config requires (299, 32)",
    ),
    "no heads": (config(num_attention_heads=0), "num_attention_heads 0"),
    "a negative context": (config(max_position_embeddings=-5), "max_position_embeddings -5"),
    "a context in words": (config(max_position_embeddings="many"), "max_position_embeddings 'many'"),
    "base 0": (rope(rope_theta=0.0), "rope_theta 0.0"),
    "base NaN": (rope(rope_theta=float("nan")), "rope_theta nan"),
    "a negative factor": (rope(rope_type="yarn", factor=-4.0), "factor -4.0"),
    "an unknown scaling": (rope(rope_type="evil"), "evil"),
    "weights elsewhere": (config(transformers_weights="../other.safetensors"), "transformers_weights"),
    "an adapter": (content("adapter_config.json", b'{"base_model_name_or_path": "/etc"}'), "is an adapter"),
    "biases that its config leaves out": (
        change_weights(lambda weights: weights.update({f"{GATE[:-6]}bias": torch.ones(48)})),
        f"its config does not use 1 of its weights ({GATE[:-6]}bias",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_contradicts_itself_or_the_weights_is_refused(name, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    damage, said = CONFIGS[name]
    damage(folder)

    check_sentence(evaluate(folder), said)

    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["a list", "no heads", "a negative context", "a context in words", "base 0"])
def test_the_same_sentence_without_the_weights(name, folder):
    damage, said = CONFIGS[name]
    damage(folder)

    check_sentence(run("rope", "--model", folder, "--context", "1K"), said)
    if name != "base 0":
        check_sentence(run("plan", "tiny", "--gpu", "4090", "--model", folder), said)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"<html>503</html>" * 9], ids=["empty", "magic alone", "a page"])
def test_a_file_that_is_not_gguf_is_refused(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    check_sentence(run("rope", "--model", path, "--context", "1K"), "its config could not be read")
    check_sentence(run("plan", "tiny", "--gpu", "4090", "--model", path), "its config could not be read")
