"""Other people's trainers against our own step: loss, gradients and parameters, on the same rows."""

import copy
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from factory import build_model, build_tokenizer, random_row
from unspool.core.errors import ConfigError
from unspool.data.facts import word_list
from unspool.data.packing.row import Row
from unspool.data.strategies.pose import PoSE
from unspool.data.strategies.utk import UtK
from unspool.models.extend import load
from unspool.models.load import decide_by_document
from unspool.models.rotary import apply_head_bases
from unspool.recipe.packed_dataset import pack
from unspool.training.batch import build_batch
from unspool.training.collator import Collator
from unspool.training.loader import StepBatches
from unspool.training.step import train_step

from .parallel.ranks import run_ranks

STEPS = 5
# AdamW divides every value by its own size: the last digit of a value near 0 would decide the sign of its update.
ADAMW: dict[str, float] = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0}
# Micro-batches of one step differ much in how many labels count, so that a mean of means would be another number.
DOC_LENS = ((9, 7), (1, 15), (16,), (5, 1, 10))
KINDS = ("packed", "tangled", "sft")


def build_rows(kind: str, count: int) -> list[Row]:
    found = []
    for seed in range(count):
        doc_lens = DOC_LENS[seed % len(DOC_LENS)]
        mask = (0.1, 0.9, 0.4, 0.0)[seed % 4] if kind == "sft" else None
        attention = "full" if kind == "tangled" else "intra_document"
        found.append(random_row(doc_lens, seed, mask=mask, attention=attention))
    return found


class Optimizer:
    """Our step's updater around an optimizer of torch; keeps every step's gradient."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.grads = model, optimizer, []

    def begin(self, lr: float) -> None:
        self.model.zero_grad(set_to_none=True)

    def finish(self, *, is_good: bool, max_norm: float) -> float:
        self.grads.append(gradients(self.model))
        self.optimizer.step()
        return float(torch.nn.utils.get_total_norm(self.grads[-1].values()))


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW)


Run = tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]  # losses, gradients of each step, parameters


def our_run(model: Any, rows: Sequence[Row], accumulation: int) -> Run:
    updater, losses = Optimizer(model, adamw(model)), []
    for first in range(0, len(rows), accumulation):
        step = rows[first : first + accumulation]
        batches = tuple(build_batch([row], attention="intra_document") for row in step)
        names = ("rows",) * len(batches)
        picks = [[("rows", number)] for number in range(len(batches))]
        found = train_step(model, updater, StepBatches(picks=picks, doc_lens=(), names=names, batches=batches), lr=0.0)
        losses.append(found.loss)
    return losses, updater.grads, parameters(model)


def parameters(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plain_run(model: Any, rows: Sequence[Row], accumulation: int, folder: Any) -> Run:
    loader = DataLoader(rows, batch_size=accumulation, collate_fn=Collator(model).step)
    optimizer, losses, grads = adamw(model), [], []
    for step in loader:
        total = 0.0
        for batch in step:
            loss = model(**batch).loss
            loss.backward()
            total += loss.item()
        losses.append(total)
        grads.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, parameters(model)


class Keep(TrainerCallback):
    def __init__(self) -> None:
        self.grads: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.grads.append(gradients(model))


SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "remove_unused_columns": False,
    "per_device_train_batch_size": 1,
    "learning_rate": ADAMW["lr"],
    "adam_epsilon": ADAMW["eps"],
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "num_train_epochs": 1,
}


def trainer_run(model: Any, rows: Sequence[Row], accumulation: int, folder: Any) -> Run:
    keep = Keep()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(str(folder), **SETTINGS, gradient_accumulation_steps=accumulation),
        train_dataset=rows,
        data_collator=Collator(model),
        callbacks=[keep],
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], keep.grads, parameters(model)


def trl_run(model: Any, rows: Sequence[Row], accumulation: int, folder: Any) -> Run:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    keep = Keep()
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            str(folder),
            **SETTINGS,
            gradient_accumulation_steps=accumulation,
            dataset_kwargs={"skip_prepare_dataset": True},
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list([hf_row(row) for row in rows]),
        data_collator=Collator(model),
        processing_class=build_tokenizer(),
        callbacks=[keep],
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], keep.grads, parameters(model)


def hf_row(row: Row) -> dict[str, Any]:
    """A row as `PackedDataset.to_hf()` has it."""
    batch = build_batch([row], attention="intra_document")
    return {
        "input_ids": batch.tokens.tolist(),
        "labels": torch.nn.functional.pad(batch.shift_labels[:-1], (1, 0), value=-100).tolist(),
        "position_ids": batch.position_ids.tolist(),
        "seq_lengths": list(batch.doc_lens),
    }


def accelerate_run(model: Any, rows: Sequence[Row], accumulation: int, folder: Any) -> Run:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(rows, batch_size=accumulation, collate_fn=Collator(model).step)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    losses, grads = [], []
    for step in loader:
        total = 0.0
        for batch in step:
            loss = model(**batch).loss
            accelerator.backward(loss)
            total += loss.item()
        losses.append(total)
        grads.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, parameters(model)


def lightning_run(model: Any, rows: Sequence[Row], accumulation: int, folder: Any) -> Run:
    lightning = pytest.importorskip("lightning")
    losses, grads = [], []

    class Module(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, step: list[dict[str, Any]], _: int) -> None:
            total = 0.0
            for batch in step:
                loss = self.model(**batch).loss
                self.manual_backward(loss)
                total += loss.item()
            losses.append(total)
            grads.append(gradients(self.model))
            self.optimizers().step()
            self.optimizers().zero_grad()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

    loader = DataLoader(rows, batch_size=accumulation, collate_fn=Collator(model).step)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **quiet).fit(Module(), loader)
    return losses, grads, parameters(model)


TRAINERS: dict[str, Callable[..., Run]] = {
    "plain": plain_run,
    "transformers": trainer_run,
    "trl": trl_run,
    "accelerate": accelerate_run,
    "lightning": lightning_run,
}


def assert_same(found: Run, wanted: Run) -> None:
    assert len(found[1]) == len(wanted[1]) == STEPS
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    pairs = [*zip(found[1], wanted[1], strict=True), (found[2], wanted[2])]
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)


def _is_fast(trainer: str, family: str, kind: str, accumulation: int) -> bool:
    return (family, accumulation) == ("llama", 4) and (trainer == "plain" or kind == "sft")


@pytest.mark.parametrize(
    ("trainer", "family", "kind", "accumulation"),
    [
        # Fast: all rows in the plain loop, and of every other trainer the hardest case.
        pytest.param(*case, marks=() if _is_fast(*case) else pytest.mark.slow)
        for case in itertools.product(TRAINERS, ("llama", "qwen2"), KINDS, (1, 4))
    ],
)
def test_loss_gradients_and_parameters_are_those_of_our_step(trainer, family, kind, accumulation, tmp_path):
    rows = build_rows(kind, STEPS * accumulation)
    model = build_model(family)
    ours = our_run(copy.deepcopy(model), rows, accumulation)

    assert_same(TRAINERS[trainer](model, rows, accumulation, tmp_path), ours)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_stock_attention_keeps_documents_apart_by_the_positions_of_the_collator(trainer, attention, tmp_path):
    rows = build_rows("packed", STEPS * 2)
    ours = our_run(build_model(), rows, 2)

    assert_same(TRAINERS[trainer](build_model(attention=attention), rows, 2, tmp_path), ours)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_harpe_is_trained_as_in_our_step(trainer, tmp_path):
    rows = build_rows("packed", STEPS * 2)
    model = build_model()
    decide_by_document(model)
    apply_head_bases(model, [1e2, 1e4])
    ours = our_run(copy.deepcopy(model), rows, 2)
    plain = our_run(build_model(), rows, 2)

    assert_same(TRAINERS[trainer](model, rows, 2, tmp_path), ours)
    assert abs(plain[0][0] - ours[0][0]) > 1e-3, "the bases changed nothing, so this would check nothing"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [UtK(min_split=8, probability=1.0), PoSE(target=512)], ids=["utk", "pose"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_rows_of_a_strategy_are_trained_as_in_our_step(trainer, strategy, tmp_path):
    """Chunks of several documents with masked labels, and positions that skip."""
    model, tokenizer = load("asset:tiny-base", device="cpu")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(word_list(), size=30)) for _ in range(60)]
    dataset = pack(texts, tokenizer, seq_len=128, packing="concat", strategy=strategy)
    dataset.fit_vocabulary(model, tokenizer)
    rows = [dataset[index] for index in range(STEPS * 2)]
    ours = our_run(copy.deepcopy(model), rows, 2)

    assert any(len(row.doc_lens) > 1 for row in rows)
    assert_same(TRAINERS[trainer](model, rows, 2, tmp_path), ours)


def test_harpe_with_stock_attention_is_refused():
    model = build_model()
    apply_head_bases(model, [1e2, 1e4])
    model.set_attn_implementation("sdpa")

    with pytest.raises(ConfigError, match="base per head"):
        Collator(model)


@pytest.mark.slow
def test_accelerate_on_two_processes_averages_over_the_tokens_of_both(tmp_path):
    """By the loop of docs/how-to/other-trainers.md."""
    rows = build_rows("sft", 8)
    wanted = our_run(build_model(), rows, 8)[1][0]

    def work(rank: int) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        accelerator, model = Accelerator(cpu=True), build_model()
        assert accelerator.num_processes == 2
        steps = DataLoader(rows, batch_size=4, collate_fn=Collator(model).step)
        model, steps = accelerator.prepare(model, steps)
        step = next(iter(steps))
        tokens = accelerator.gather(torch.tensor([step[0]["num_items_in_batch"]])).sum()
        for batch in step:
            accelerator.backward(model(**batch | {"num_items_in_batch": tokens}).loss * accelerator.num_processes)
        for name, grad in gradients(accelerator.unwrap_model(model)).items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-5, atol=1e-5 * float(wanted[name].abs().max()))

    run_ranks(work, world_size=2, store=tmp_path / "store")
