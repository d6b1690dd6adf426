"""`unspool train` on several ranks against an independent reference: plain `transformers`, document by document.

Beyond the original length, for every kind of RoPE and of rows, with ranks that hold no valid token.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from factory import build_model, build_tokenizer
from unspool.data.facts import word_list
from unspool.data.strategies.utk.special_tokens import knot_ids

from .command_ranks import run_command
from .plain_reference import Reference, Rope, losses_of, train_plain, update_error, weights_of

ORIGINAL, CONTEXT, STEPS, LR = 64, 128, 3, 1e-3
SHORT, LONG = [1.0, 1.1, 1.3, 1.5], [1.2, 2.0, 3.5, 6.0]
HEADS = 12  # for 2, 3 and 4 ranks
ROPES = {
    "longrope": Rope(
        {"method": "longrope", "short_factor": SHORT, "long_factor": LONG},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": SHORT,
            "long_factor": LONG,
        },
    ),
    "dynamic": Rope({"method": "dynamic", "factor": 4}, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "yarn": Rope(
        {"method": "yarn"},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "harpe": Rope({"method": "harpe", "low": 1e4, "high": 1e5}, bases=tuple(np.linspace(1e5, 1e4, HEADS).tolist())),
}
ROWS: dict[str, dict[str, Any]] = {
    "packed": {"from": "books", "seq_len": CONTEXT},
    "tangled": {"from": "books", "seq_len": CONTEXT, "utk": {"min_split": 16}},
    "sft": {"from": "talks", "seq_len": CONTEXT, "packing": "truncate"},
}
# By number of ranks. With two data ranks, each has every second row of a step.
LAYOUTS: dict[int, dict[str, Any]] = {2: {"ulysses": 2}, 3: {"ulysses": 3}, 4: {"ulysses": 2}}
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# Differences of fp32 sums in another order; the base of AdamW's steps makes the most of the smallest gradients.
LOSS, UPDATE = 2e-6, 5e-3


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Path:
    """A model, books of lengths below and above its context, and conversations with short answers at their ends."""
    folder = tmp_path_factory.mktemp("against-transformers")
    tokenizer = build_tokenizer()
    knot_ids(tokenizer)  # so that the reference need not know how embeddings of new tokens start
    shape = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": 96, "intermediate_size": 64}
    model = build_model(vocab_size=320, max_position_embeddings=ORIGINAL, rope_theta=1e4, **shape)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng, words = np.random.default_rng(0), word_list()

    def text(count: int) -> str:
        return " ".join(rng.choice(words, size=count))

    books = [{"text": text(int(rng.integers(2, 30)))} for _ in range(120)]
    talks = [
        {"messages": [{"role": "user", "content": text(14)}, {"role": "assistant", "content": text(1)}]}
        for _ in range(60)
    ]
    for name, lines in (("books", books), ("talks", talks)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "plain.jinja").write_text(TEMPLATE)
    return folder


def save_recipe(material: Path, folder: Path, *, rope: dict[str, Any] | None, rows: str, **stage: Any) -> Path:
    plain = {
        "name": "reference",
        "model": str(material / "model"),
        "device": "cpu",
        "out": str(folder / "out"),
        "engine": {"workers": 1},
        "sources": {
            "books": {"kind": "jsonl", "path": str(material / "books.jsonl")},
            "talks": {"kind": "chat", "path": str(material / "talks.jsonl"), "template": str(material / "plain.jinja")},
        },
        "datasets": {rows: ROWS[rows]},
        "stages": [
            {
                "name": "one",
                "context_length": CONTEXT,
                "mix": {rows: 1.0},
                "tokens": STEPS * 2 * CONTEXT,
                "batch_tokens": 2 * CONTEXT,
                "lr": LR,
                "warmup_ratio": 0.0,
                "min_lr_ratio": 1.0,
            }
            | ({"rope": rope} if rope else {})
            | stage
        ],
    }
    plain["sources"] = {ROWS[rows]["from"]: plain["sources"][ROWS[rows]["from"]]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(plain))
    return folder / "recipe.yaml"


def trained(material: Path, folder: Path, rope: Rope, rows: str, world_size: int, **stage: Any) -> Path:
    """The folder of a stage that `unspool train` trained on so many ranks."""
    recipe = save_recipe(material, folder, rope=rope.recipe, rows=rows, **stage)
    ended = run_command(lambda rank: ["train", str(recipe)], world_size=world_size, folder=folder)
    assert [code for code, _ in ended] == [0] * world_size, "\n".join(text for _, text in ended)
    return folder / "out" / "stages" / "one"


def check(material: Path, folder: Path, rope: Rope, rows: str, world_size: int, **stage: Any) -> Reference:
    out = trained(material, folder, rope, rows, world_size, **stage)
    wanted = train_plain(material / "model", folder / "out" / "datasets" / rows, out, rope, lr=LR)
    assert losses_of(out) == pytest.approx(wanted.losses, rel=LOSS)
    assert update_error(weights_of(out), wanted) < UPDATE
    return wanted


def test_two_ranks_that_share_packed_rows_train_as_plain_transformers(material, tmp_path):
    wanted = check(material, tmp_path, ROPES["longrope"], "packed", 2, parallel=LAYOUTS[2])

    assert min(wanted.doc_lens) <= ORIGINAL < max(wanted.doc_lens), "documents on both sides of the threshold"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", LAYOUTS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ROPES)
def test_ranks_train_as_plain_transformers_does_alone(material, tmp_path, name, rows, world_size):
    wanted = check(material, tmp_path, ROPES[name], rows, world_size, parallel=LAYOUTS[world_size])

    assert max(wanted.doc_lens) > ORIGINAL
    if rows == "packed":
        assert min(wanted.doc_lens) <= ORIGINAL
    if rows == "sft":
        # With four ranks each pair has one row per step, so that such a rank has no valid label in that step at all.
        assert wanted.empty_parts(LAYOUTS[world_size]["ulysses"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize(("world_size", "parallel"), [(2, {"ring": 2}), (4, {"ring": 2, "ulysses": 2})])
def test_a_ring_trains_as_plain_transformers_does_alone(material, tmp_path, name, world_size, parallel):
    check(material, tmp_path, ROPES[name], "tangled", world_size, parallel=parallel)
