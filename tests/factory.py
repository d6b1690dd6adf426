"""Small models, tokenizers, rows and kills, made on the spot for the tests of model, train and recipes."""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from unspool.core.artifacts import publish
from unspool.data.facts import word_list
from unspool.data.packing.row import Row
from unspool.data.packing.store import RowWriter
from unspool.models.attention.interface import NAME, register
from unspool.models.attention.reference import AttentionInputs
from unspool.training.config import StageConfig

CPU = torch.device("cpu")
VOCAB = 300
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Large weights, so that what a position sees shows in what it says.
    "initializer_range": 0.2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
}


def build_model(family: str = "llama", *, attention: str = NAME, seed: int = 0, **changes: Any) -> Any:
    """A random model in evaluation mode; the same weights for the same seed, whatever its attention."""
    register()
    name, own = FAMILIES.get(family, (family, {}))
    config = getattr(transformers, f"{name}Config")(**SHAPE | own | changes, attn_implementation=attention)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        # Biases and norms start at 0 and 1, where leaving them out would not be noticed.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and little more: fewer tokens than `VOCAB`, as most models have some embeddings to spare."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["the river runs past the old mill and the bridge " * 20], trainer)
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def save_folder(folder: Path, model: Any | None = None) -> Path:
    """A model folder as a user has it, written by plain `transformers`."""
    (model or build_model()).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def random_tokens(count: int, seed: int = 0, vocab: int = 270) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(vocab, size=(1, count)))


def random_row(
    doc_lens: Sequence[int], seed: int, *, mask: float | None = None, attention: str = "intra_document"
) -> Row:
    """`mask` is the share of tokens that are never asked for."""
    rng = np.random.default_rng(seed)
    length = sum(doc_lens)
    return Row(
        tokens=rng.integers(270, size=length).astype(np.uint32),
        doc_lens=np.array(doc_lens, dtype=np.int32),
        loss_mask=None if mask is None else rng.random(length) >= mask,
        source="made-up",
        attention=attention,
    )


class RowList(list[Row]):
    """Rows in memory, where a `RowSet` is expected."""

    @property
    def row_len(self) -> int:
        return len(self[0].tokens)


def save_rows(folder: Path, rows: Sequence[Row], *, added_tokens: Mapping[str, int] | None = None) -> Path:
    """A rows artifact, as `data.rows` publishes it."""
    masked = any(row.loss_mask is not None for row in rows)
    with publish(folder, kind="dataset", inputs={}, settings={}) as draft:
        with RowWriter(draft.folder, row_len=len(rows[0].tokens), masked=masked) as writer:
            for row in rows:
                writer.append(row)
        draft.counts = {"rows": len(rows)} | ({"added_tokens": dict(added_tokens)} if added_tokens else {})
    return folder


def build_stage(**changes: Any) -> StageConfig:
    plain = {"name": "one", "context_length": 32, "mix": {"long": 1.0}, "tokens": 384, "batch_tokens": 64, "lr": 1e-3}
    return StageConfig.model_validate(plain | changes)


def packed_inputs(tokens: torch.Tensor, doc_lens: Sequence[int]) -> dict[str, Any]:
    positions = torch.cat([torch.arange(doc_len) for doc_len in doc_lens])[None]
    return {"input_ids": tokens, "position_ids": positions.to(tokens.device), "doc_lens": tuple(doc_lens)}


def die() -> None:
    """What no `finally` survives."""
    os.kill(os.getpid(), signal.SIGKILL)


def dying_if(function: Callable[..., Any], moment: Callable[..., bool]) -> Callable[..., Any]:
    """`function`, until a call for which `moment` holds: that one kills the process before it does anything."""

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if moment(*args, **kwargs):
            die()
        return function(*args, **kwargs)

    return replaced


def dying_at(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """`function`, until its `number`-th call."""
    calls = count(1)
    return dying_if(function, lambda *args, **kwargs: next(calls) == number)


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; 0 if it ended, −9 if it was killed."""
    if torch.cuda.is_initialized():
        pytest.skip("a process that has used CUDA cannot fork; run this test by itself")
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            # Not sys.exit: nothing of pytest may run twice.
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_file_events(work: Callable[[], None], path: Path) -> int:
    """How many times `work` asks the system to open, make, rename or remove a file."""

    def counted() -> None:
        events = _on_file_events(lambda number: None)
        work()
        path.write_text(str(events()))

    assert in_child(counted) == 0
    return int(path.read_text())


def in_child_dying_at_file_event(work: Callable[[], None], number: int) -> int:
    """Like `in_child`, killed just before the `number`-th file event. The same number is always the same moment."""

    def watched() -> None:
        _on_file_events(lambda at: die() if at == number else None)
        work()

    return in_child(watched)


def _on_file_events(react: Callable[[int], None]) -> Callable[[], int]:
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            seen += 1
            react(seen)

    sys.addaudithook(hook)  # cannot be taken back, so only ever in a child
    return lambda: seen


DAMAGES = ("flip", "truncate", "delete", "swap")


def damage(path: Path, kind: str, other: Path | None = None, *, at: float = 0.5) -> None:
    """Change one bit of a file, shorten it, delete it, or exchange it with `other`, or two lines if there is none."""
    content = path.read_bytes()
    if kind == "flip":
        place = int(len(content) * at)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif kind == "truncate":
        path.write_bytes(content[: int(len(content) * at)])
    elif kind == "delete":
        path.unlink()
    elif other is not None:
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        lines = content.splitlines(keepends=True)
        first, last = 0, len(lines) // 2
        lines[first], lines[last] = lines[last], lines[first]
        path.write_bytes(b"".join(lines))


# A recipe as small as it can be

# In place of the size that it names.
SMALL_SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}

MINI = """\
name: mini
model: {size: 4M, tokenizer: asset:tiny-base, context_length: 64}
engine: {workers: 1}
sources:
  books: {kind: jsonl, path: books.jsonl}
datasets:
  long: {from: books, seq_len: 128}
  tangled: {from: books, seq_len: 128, utk: {min_split: 32}}
stages:
  - {name: first, context_length: 128, mix: {long: 1}, tokens: 768, batch_tokens: 256, lr: 1e-3, checkpoint_every: 1}
  - name: abf
    init: first
    context_length: 128
    rope: {method: abf, base: 1e5}
    mix: {long: 1}
    tokens: 512
    batch_tokens: 256
    lr: 1e-3
  - name: utk
    init: first
    context_length: 128
    rope: {method: harpe, low: 1e4, high: 1e5}
    mix: {tangled: 0.5, long: 0.5}
    tokens: 512
    batch_tokens: 256
    lr: 1e-3
evals:
  - {suite: niah, lengths: [128], samples: 2, value: words, text: held-out.jsonl}
  - {suite: key_value, lengths: [128], samples: 2, value: words}
  - {suite: perplexity, length: 128, samples: 2, text: held-out.jsonl}
"""


def save_mini(folder: Path) -> Path:
    """`MINI` with the text it needs beside it: a model of its own, and two arms that start from it."""
    folder.mkdir(parents=True, exist_ok=True)
    words = word_list()
    rng = np.random.default_rng(0)
    for name, num_docs, num_sentences in (("books", 20, 40), ("held-out", 3, 80)):
        texts = [
            " ".join(" ".join(rng.choice(words, size=9)).capitalize() + "." for _ in range(num_sentences))
            for _ in range(num_docs)
        ]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    path = folder / "mini.yaml"
    path.write_text(MINI)
    return path


def attention_inputs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> AttentionInputs:
    return AttentionInputs(query=query, key=key, value=value, **options)
