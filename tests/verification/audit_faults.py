"""Training setups with a planted mistake, each in the code path of a real trainer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AttentionInterface, DataCollatorForSeq2Seq, Trainer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from unspool.training.collator import Collator

from .audit_setups import (
    PAD,
    QUIET,
    hf_trainer,
    left_padding,
    lightning_setup,
    packed,
    padded_tokenizer,
    rows,
    sft_trainer,
    small_model,
    tensors,
    texts,
)


@dataclass(frozen=True)
class Fault:
    build: Callable[[], Any]
    promise: str  # the one that it breaks
    evidence: str  # in its verdict
    also: tuple[str, ...] = field(default=())  # promises that are broken with it


def drop_masks_for_context_parallelism(model: Any) -> Any:
    """What accelerate attaches to the model under context parallelism, without its check of layer types."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    config = model.config
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    try:
        config.sliding_window = None
        if types is not None:
            config.layer_types = ["full_attention"] * len(types)
        _attach_context_parallel_hooks(model)
    finally:
        config.sliding_window = window
        if types is not None:
            config.layer_types = types
    return model


def packing_with_context_parallelism() -> Any:
    """TRL pull request 6843: packing needs a block-diagonal mask, which context parallelism drops."""
    model = drop_masks_for_context_parallelism(small_model())
    return sft_trainer(model=model, packing=True, packing_strategy="bfd", max_length=32)


def sliding_windows_with_context_parallelism() -> Any:
    """Accelerate pull request 4177: so is the mask of sliding-window layers."""
    model = drop_masks_for_context_parallelism(small_model("mistral", sliding_window=6))
    data = [{"input_ids": text} for row in texts() for text in row if len(text) > 8]
    collate = DataCollatorForSeq2Seq(padded_tokenizer())
    return hf_trainer(model, [item | {"labels": item["input_ids"]} for item in data], collate)


def mixed_layers_with_context_parallelism() -> Any:
    layers = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    model = drop_masks_for_context_parallelism(small_model("qwen3", **layers))
    data = [{"input_ids": text, "labels": text} for row in texts() for text in row if len(text) > 8]
    return hf_trainer(model, data, DataCollatorForSeq2Seq(padded_tokenizer()))


def mask_of_ones_beside_positions() -> Any:
    """Transformers pull request 46634: a 2D mask of ones turns off the search for packed documents."""
    return hf_trainer(
        small_model(),
        packed(),
        lambda items: tensors(items[0], attention_mask=torch.ones(1, len(items[0]["input_ids"]))),
    )


def key_value_cache_in_training() -> Any:
    """The default of models: with a cache, packed documents are not searched for either."""

    def step(model: Any, batches: list[Any]) -> None:
        num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        for batch in batches:
            model(**batch, num_items_in_batch=num_items).loss.backward()

    return {"model": small_model(), "data": [tensors(item) for item in packed()], "step_fn": step}


def wrapped_packing() -> Any:
    """TRL cuts a stream of documents into rows and forgets where they end."""
    return sft_trainer(packing=True, packing_strategy="wrapped", max_length=32)


def labels_shifted_by_the_collator() -> Any:
    def collate(items: list[Any]) -> dict[str, Tensor]:
        batch = tensors(items[0])
        shifted = torch.full_like(batch["labels"], -100)
        shifted[:, :-1] = batch["labels"][:, 1:]
        return batch | {"labels": shifted}

    return hf_trainer(small_model(), packed(), collate)


def labels_not_shifted() -> Any:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        losses = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return losses / num_items_in_batch

    return hf_trainer(small_model(), packed(), lambda items: tensors(items[0]), compute_loss_func=loss)


def mean_of_means_in_trainer() -> Any:
    class OwnLoss(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return model(**inputs).loss / self.args.gradient_accumulation_steps

    return hf_trainer(small_model(), packed(), lambda items: tensors(items[0]), OwnLoss)


def mean_of_means_in_accelerate() -> Any:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=4), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(model: Any, batches: list[Any]) -> None:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch, use_cache=False).loss)
                optimizer.step()
                optimizer.zero_grad()

    return {"model": model, "data": [tensors(item) for item in packed()], "step_fn": step}


def mean_of_means_in_lightning() -> Any:
    def fit(lightning: Any, batches: list[Any], model: Any) -> None:
        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: Any, _: int) -> Any:
                return self.model(**{name: value for name, value in batch.items() if name != "num_items_in_batch"}).loss

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.model.parameters(), lr=0.1)

        loader = DataLoader(batches, batch_size=None, collate_fn=None)
        lightning.Trainer(accelerator="cpu", max_epochs=1, accumulate_grad_batches=4, **QUIET).fit(Module(), loader)

    return lightning_setup(fit)


def ignored_tokens_in_the_divisor() -> Any:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return losses.sum() / num_items_in_batch * (labels != -100).sum() / labels.numel()

    data = [{"input_ids": text, "labels": text} for row in texts() for text in row]
    collate = DataCollatorForSeq2Seq(padded_tokenizer())
    return hf_trainer(small_model(), data, collate, args={"per_device_train_batch_size": 2}, compute_loss_func=loss)


def padding_counted() -> Any:
    data = [{"input_ids": text, "labels": text} for row in texts() for text in row]
    collate = DataCollatorForSeq2Seq(padded_tokenizer(), label_pad_token_id=PAD)
    return hf_trainer(small_model(), data, collate, args={"per_device_train_batch_size": 2})


def mask_dropped_with_left_padding() -> Any:
    """An attention function without a mask function: `transformers` then drops every attention_mask."""
    AttentionInterface.register("no-masks", sdpa_attention_forward)
    return left_padding("no-masks")


def positions_not_reset() -> Any:
    """A mask keeps documents apart, but positions run on."""

    def collate(items: list[Any]) -> dict[str, Tensor]:
        batch = tensors(items[0])
        document = torch.cumsum(batch["position_ids"] == 0, dim=1)[0]
        seen = (document[:, None] == document[None]).tril()[None, None]
        return batch | {"attention_mask": seen, "position_ids": torch.arange(len(document))[None]}

    return hf_trainer(small_model(), packed(), collate)


def first_tokens_predicted() -> Any:
    def collate(items: list[Any]) -> dict[str, Tensor]:
        batch = tensors(items[0])
        return batch | {"labels": batch["input_ids"]}

    return hf_trainer(small_model(), packed(), collate)


def last_micro_batch_dropped() -> Any:
    class Dropping(Trainer):
        def get_batch_samples(self, iterator: Any, count: int, device: Any) -> Any:
            return super().get_batch_samples(iterator, count - 1, device)

    return hf_trainer(small_model(), packed(), lambda items: tensors(items[0]), Dropping)


def gradients_cleared_in_every_micro_batch() -> Any:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, batches: list[Any]) -> None:
        num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        for batch in batches:
            optimizer.zero_grad()
            model(**batch, num_items_in_batch=num_items, use_cache=False).loss.backward()
        optimizer.step()

    return {"model": model, "data": [tensors(item) for item in packed()], "step_fn": step}


def config_of_the_base_model_saved() -> Any:
    """The model was extended, and the saved folder has the RoPE settings from before."""
    base = small_model()
    model = small_model(rope_parameters={"rope_type": "default", "rope_theta": 1e6})

    class Saving(Trainer):
        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            base.config.save_pretrained(output_dir)

    return hf_trainer(model, packed(), lambda items: tensors(items[0]), Saving)


def config_changed_after_loading() -> Any:
    """The rotary module still has the tables of the old config."""
    model = small_model()
    model.config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    return hf_trainer(model, packed(), lambda items: tensors(items[0]))


def keys_stay_on_their_rank() -> Any:
    """Context parallelism that splits rows and exchanges nothing."""

    def parallel(model: Any, batches: list[Any]) -> float:
        num_items = sum(int((batch["shift_labels"] != -100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            for ids, positions, labels in zip(
                *(batch[name].chunk(2, dim=1) for name in ("input_ids", "position_ids", "shift_labels")), strict=True
            ):
                inputs = {"input_ids": ids, "position_ids": positions, "labels": labels, "shift_labels": labels}
                loss = model(**inputs, num_items_in_batch=num_items, use_cache=False).loss
                loss.backward()
                total += loss.item()
        return total

    model = small_model(attention="unspool")
    loader = DataLoader(rows(), batch_size=4, collate_fn=Collator(model).step)

    def step(model: Any, batches: list[Any]) -> float:
        return sum(backward(model(**batch).loss) for batch in batches)

    return {"model": model, "data": loader, "step_fn": step, "context_parallel": parallel}


def backward(loss: Tensor) -> float:
    loss.backward()
    return loss.item()


FAULTS = {
    fault.build.__name__: fault
    for fault in (
        Fault(packing_with_context_parallelism, "isolation", "hidden states by"),
        Fault(
            sliding_windows_with_context_parallelism,
            "sliding_window",
            "layer 0 (sliding window 6) sees 20",
            also=("checkpoint",),
        ),
        Fault(
            mixed_layers_with_context_parallelism,
            "sliding_window",
            "layer 0 (sliding window 6) sees 20",
            also=("checkpoint",),
        ),
        Fault(mask_of_ones_beside_positions, "isolation", "boundaries from position_ids"),
        Fault(key_value_cache_in_training, "isolation", "boundaries from position_ids"),
        Fault(wrapped_packing, "isolation", "boundaries from end-of-text", also=("first_token", "positions")),
        Fault(labels_shifted_by_the_collator, "labels", "shifted twice"),
        Fault(labels_not_shifted, "labels", "not shifted"),
        Fault(mean_of_means_in_trainer, "token_mean", "mean of micro-batch means"),
        Fault(mean_of_means_in_accelerate, "token_mean", "mean of micro-batch means"),
        Fault(mean_of_means_in_lightning, "token_mean", "mean of micro-batch means"),
        Fault(ignored_tokens_in_the_divisor, "token_mean", ""),
        Fault(padding_counted, "padding", "padding tokens are prediction targets"),
        Fault(mask_dropped_with_left_padding, "gradient", "cosine"),
        Fault(positions_not_reset, "positions", "instead of 0"),
        Fault(first_tokens_predicted, "first_token", "targets of the previous document"),
        Fault(last_micro_batch_dropped, "coverage", "is dropped"),
        Fault(gradients_cleared_in_every_micro_batch, "gradient", "cosine"),
        Fault(config_of_the_base_model_saved, "checkpoint", "rope_parameters"),
        Fault(config_changed_after_loading, "rope", "rope_type linear", also=("checkpoint",)),
        Fault(keys_stay_on_their_rank, "context_parallel", "gradients differ"),
    )
}
