"""Training setups that are right, for `unspool.audit`, and what setups with mistakes are built from."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer, TrainingArguments

from factory import build_model, build_tokenizer, random_row
from unspool.models.rotary import apply_head_bases, decide_by_document
from unspool.training.collator import Collator

EOS, PAD = 2, 0
DOC_LENS = ((9, 15), (3, 8, 10), (12, 6), (20,), (5, 5, 11), (7, 16))


def small_model(family: str = "llama", *, attention: str = "sdpa", **changes: Any) -> Any:
    return build_model(family, attention=attention, eos_token_id=EOS, pad_token_id=PAD, **changes)


def texts() -> list[list[list[int]]]:
    """Documents of each row, which end with EOS."""
    rng = np.random.default_rng(0)
    return [[[*rng.integers(3, 270, size=length - 1).tolist(), EOS] for length in lens] for lens in DOC_LENS]


def rows() -> list[Any]:
    return [random_row(lens, seed) for seed, lens in enumerate(DOC_LENS)]


def packed() -> list[dict[str, Any]]:
    """Rows as a user has packed them: their tokens and positions."""
    return [
        {"input_ids": [*chain(*row)], "position_ids": [at for text in row for at in range(len(text))]}
        for row in texts()
    ]


def tensors(item: dict[str, Any], **more: Any) -> dict[str, Tensor]:
    """A batch of one packed row with labels that are not shifted."""
    batch = {name: torch.tensor([value]) for name, value in item.items()}
    labels = batch["input_ids"].clone()
    labels[batch["position_ids"] == 0] = -100
    return batch | {"labels": labels} | more


def hf_trainer(
    model: Any, data: Sequence[Any], collate: Callable[..., Any], kind: type[Trainer] = Trainer, **options: Any
) -> Any:
    settings = {"use_cpu": True, "report_to": [], "remove_unused_columns": False, "per_device_train_batch_size": 1}
    args = TrainingArguments("unused", **settings | options.pop("args", {}), gradient_accumulation_steps=4)
    return kind(model=model, args=args, train_dataset=list(data), data_collator=collate, **options)


def plain_step(model: Any, batches: list[Any]) -> float:
    num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = model(**batch | {"num_items_in_batch": num_items, "use_cache": False}).loss
        loss.backward()
        total += loss.item()
    return total


# Set-ups that are right


def right_collator_in_trainer() -> Any:
    model = small_model(attention="unspool")
    return hf_trainer(model, rows(), Collator(model))


def right_flattening_in_trainer() -> Any:
    return hf_trainer(
        small_model(),
        [{"input_ids": text} for row in texts() for text in row],
        DataCollatorWithFlattening(),
        args={"per_device_train_batch_size": 3},
    )


def right_padding_in_trainer() -> Any:
    data = [{"input_ids": text, "labels": text} for row in texts() for text in row]
    return hf_trainer(
        small_model("qwen2"), data, DataCollatorForSeq2Seq(padded_tokenizer()), args={"per_device_train_batch_size": 2}
    )


def right_left_padding_with_our_attention() -> Any:
    return left_padding("unspool")


def left_padding(attention: str) -> Any:
    """Without labels for first tokens, which padding before them would predict."""
    tokenizer = padded_tokenizer()
    tokenizer.padding_side = "left"
    data = [{"input_ids": text, "labels": [-100, *text[1:]]} for row in texts() for text in row]
    args = {"per_device_train_batch_size": 2}
    return hf_trainer(small_model(attention=attention), data, DataCollatorForSeq2Seq(tokenizer), args=args)


def padded_tokenizer() -> Any:
    tokenizer = build_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PAD)
    return tokenizer


def right_plain_loop() -> Any:
    return {
        "model": small_model(attention="eager"),
        "data": [tensors(item) for item in packed()],
        "step_fn": plain_step,
    }


def right_sliding_windows() -> Any:
    model = small_model("mistral", sliding_window=6)
    return {"model": model, "data": [tensors(item) for item in packed()], "step_fn": plain_step}


def right_accelerate_loop() -> Any:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), small_model("qwen3", attention="unspool")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(rows(), batch_size=4, collate_fn=Collator(model).step)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step(model: Any, batches: list[Any]) -> float:
        total = 0.0
        for batch in batches:
            loss = model(**batch).loss
            accelerator.backward(loss)
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return {"model": model, "data": loader, "step_fn": step}


def right_harpe() -> Any:
    model = small_model(attention="unspool")
    decide_by_document(model)
    apply_head_bases(model, [1e2, 1e4])
    return hf_trainer(model, rows(), Collator(model))


def right_full_attention() -> Any:
    model = small_model(attention="unspool")
    data = [random_row(lens, seed, attention="full") for seed, lens in enumerate(DOC_LENS)]
    loader = DataLoader(data, batch_size=4, collate_fn=Collator(model).step)

    def step(model: Any, batches: list[Any]) -> None:
        for batch in batches:
            model(**batch).loss.backward()

    return {"model": model, "data": loader, "step_fn": step, "attention": "full"}


def right_with_checkpointing_autocast_and_dropout() -> Any:
    model = small_model(attention_dropout=0.3)
    settings = {"gradient_checkpointing": True, "bf16": True}
    return hf_trainer(model, packed(), lambda items: tensors(items[0]), args=settings)


def right_label_smoothing() -> Any:
    return hf_trainer(small_model(), packed(), lambda items: tensors(items[0]), args={"label_smoothing_factor": 0.1})


def right_after_overfitting() -> Any:
    """Half of the rows are known by heart, so that the gradients of their tokens all but vanish beside the others'."""
    setup = right_plain_loop()
    optimizer = torch.optim.AdamW(setup["model"].parameters(), lr=3e-2)
    for _ in range(150):
        plain_step(setup["model"], setup["data"][::2])
        optimizer.step()
        optimizer.zero_grad()
    return setup


def right_conversations() -> Any:
    """End-of-text tokens inside of a row end turns, and no document."""
    data = []
    for first, second in zip(*[iter([text for row in texts() for text in row])] * 2, strict=False):
        data.append({"input_ids": first + second, "labels": [-100] * len(first) + second})
    tokenizer = padded_tokenizer()
    tokenizer.padding_side = "left"
    return hf_trainer(small_model(), data, DataCollatorForSeq2Seq(tokenizer), args={"per_device_train_batch_size": 2})


def right_trl_packing() -> Any:
    return sft_trainer(packing=True, packing_strategy="bfd", max_length=32)


def right_trl_padding() -> Any:
    return sft_trainer(packing=False, per_device_train_batch_size=2)


def sft_trainer(*, model: Any = None, kind: Any = None, **options: Any) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    settings = {"use_cpu": True, "report_to": [], "bf16": False, "per_device_train_batch_size": 1}
    args = trl.SFTConfig("unused", **settings | {"gradient_accumulation_steps": 4} | options)
    data = datasets.Dataset.from_list([{"input_ids": text} for row in texts() for text in row])
    return (kind or trl.SFTTrainer)(
        model=model or small_model(), args=args, train_dataset=data, processing_class=padded_tokenizer()
    )


def lightning_setup(accumulate: Callable[[Any, list[Any], Any], None]) -> Any:
    lightning = pytest.importorskip("lightning")
    model = small_model(attention="unspool")
    return {
        "model": model,
        "data": DataLoader(rows(), batch_size=4, collate_fn=Collator(model).step),
        "step_fn": lambda model, batches: accumulate(lightning, batches, model),
    }


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def right_lightning() -> Any:
    def fit(lightning: Any, batches: list[Any], model: Any) -> None:
        class Module(lightning.LightningModule):
            automatic_optimization = False

            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, step: list[Any], _: int) -> None:
                for batch in step:
                    self.manual_backward(self.model(**batch).loss)
                self.optimizers().step()
                self.optimizers().zero_grad()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.model.parameters(), lr=0.1)

        loader = DataLoader([batches], batch_size=None, collate_fn=None)
        lightning.Trainer(accelerator="cpu", max_epochs=1, **QUIET).fit(Module(), loader)

    return lightning_setup(fit)


RIGHT = {
    build.__name__: build
    for build in (
        right_collator_in_trainer,
        right_flattening_in_trainer,
        right_padding_in_trainer,
        right_left_padding_with_our_attention,
        right_plain_loop,
        right_sliding_windows,
        right_accelerate_loop,
        right_harpe,
        right_full_attention,
        right_with_checkpointing_autocast_and_dropout,
        right_label_smoothing,
        right_conversations,
        right_after_overfitting,
        right_trl_packing,
        right_trl_padding,
        right_lightning,
    )
}
