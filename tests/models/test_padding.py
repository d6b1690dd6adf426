"""Padded batches under `unspool.register()` alone: as eager attention computes their tokens, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, StaticCache, Trainer, TrainingArguments
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import unspool
from factory import build_model, build_tokenizer, packed_inputs, random_tokens
from unspool.core.errors import ConfigError
from unspool.models.attention import padding
from unspool.models.attention.interface import NAME
from unspool.models.load import load_model
from unspool.models.rotary import apply_head_bases
from unspool.training.collator import Collator

LENGTH = 14
# First and last + 1 real token of each row.
PADDINGS = {
    "right": ((0, 14), (0, 9), (0, 3)),
    "left": ((0, 14), (5, 14), (11, 14)),
    "both": ((2, 14), (0, 9), (6, 8)),
    "one row": ((4, 14),),
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 4},
    "GptOss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def pair(family: str, tmp_path: Any) -> tuple[Any, Any]:
    """The same weights with eager attention and with ours, loaded as a user does."""
    eager = build_model(family, attention="eager", **FAMILIES[family])
    eager.save_pretrained(tmp_path / "model")
    unspool.register()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="unspool")
    return eager, ours


def padded(spans: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    tokens = torch.cat([random_tokens(LENGTH, seed) for seed in range(len(spans))])
    mask = torch.zeros_like(tokens)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = 1
    return tokens * mask, mask


@pytest.mark.parametrize("positions", ["default", "by tokens"])
@pytest.mark.parametrize("spans", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_real_tokens_get_the_logits_and_gradients_of_eager_attention(family, spans, positions, tmp_path):
    tokens, mask = padded(spans)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if positions == "by tokens":  # as `generate` numbers them; those of padding restart
        inputs["position_ids"] = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    # With padding before it, the first token would be predicted from padding, which no attention defines.
    labels = tokens.masked_fill(mask * mask.roll(1, dims=1) == 0, -100)
    found = {}
    for name, model in zip(("eager", "ours"), pair(family, tmp_path), strict=True):
        out = model(**inputs, labels=labels, use_cache=False)
        out.loss.backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found[name] = (out.logits[mask.bool()].detach(), grads)

    torch.testing.assert_close(found["ours"][0], found["eager"][0], **CLOSE)
    torch.testing.assert_close(found["ours"][1], found["eager"][1], **CLOSE)


def test_the_comparison_sees_a_mask_that_is_dropped(tmp_path, monkeypatch):
    """Without a mask function, which is what `transformers` does for unknown names."""
    eager, ours = pair("llama", tmp_path)
    tokens, mask = padded(PADDINGS["left"])
    monkeypatch.delitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, NAME)
    with torch.no_grad():
        wanted, found = (model(input_ids=tokens, attention_mask=mask).logits[mask.bool()] for model in (eager, ours))

    assert (wanted - found).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_continues_left_padded_prompts_as_eager_attention_does(family, tmp_path):
    eager, ours = pair(family, tmp_path)
    tokens, mask = padded(PADDINGS["left"])
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted, found = (model.generate(tokens, attention_mask=mask, **settings) for model in (eager, ours))

    assert torch.equal(found, wanted)


@torch.no_grad()
def test_a_base_per_head_sees_padded_rows_as_each_row_alone():
    model = build_model()
    apply_head_bases(model, [1e2, 1e4])
    tokens, mask = padded(PADDINGS["left"])
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(tokens, attention_mask=mask, **settings)
    for row, (start, _) in enumerate(PADDINGS["left"]):
        alone = model.generate(tokens[row : row + 1, start:], **settings)
        assert torch.equal(found[row, LENGTH:], alone[0, LENGTH - start :])


@torch.no_grad()
def test_padding_between_tokens_static_caches_and_other_masks_are_refused(tmp_path):
    _, ours = pair("llama", tmp_path)
    tokens, mask = padded(PADDINGS["right"])
    with pytest.raises(ConfigError, match="row 1 has padding between tokens; pad at the start or the end"):
        ours.generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None)
    cache = StaticCache(config=ours.config, max_cache_len=32)
    with pytest.raises(ConfigError, match="does not support static KV caches"):
        ours(input_ids=tokens, past_key_values=cache)
    with pytest.raises(ConfigError, match="does not support 4D attention masks"):
        ours(input_ids=tokens, attention_mask=torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool))
    with pytest.raises(ConfigError, match="doc_lens is one packed row"):
        ours(input_ids=tokens[:1], attention_mask=padded(((0, 9),))[1], doc_lens=(9, 5))
    ours.config.is_causal = False
    with pytest.raises(ConfigError, match="builds other attention masks"):
        ours(input_ids=tokens)


@torch.no_grad()
def test_documents_of_a_packed_row_stay_apart_before_padding(tmp_path):
    """Rows that another collator packs by positions alone, and then pads."""
    eager, ours = pair("llama", tmp_path)
    tokens, mask = padded(((0, 11),))
    positions = torch.tensor([[*range(7), *range(4), 0, 0, 0]])
    found = ours(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits[0]
    for start, end in ((0, 7), (7, 11)):
        torch.testing.assert_close(found[start:end], eager(input_ids=tokens[:, start:end]).logits[0], **CLOSE)
    two = torch.cat([positions, positions])
    with pytest.raises(ConfigError, match="2 rows with positions that restart"):
        ours(input_ids=tokens.repeat(2, 1), position_ids=two, attention_mask=mask.repeat(2, 1), use_cache=False)


# Masks cost nothing where there is no padding


@torch.no_grad()
@pytest.mark.parametrize("made", ["load", "collator"])
def test_packed_rows_skip_mask_creation_which_waits_for_the_device(made, tmp_path, monkeypatch):
    _, ours = pair("mistral", tmp_path)
    if made == "load":
        ours = load_model(str(tmp_path / "model"), device=torch.device("cpu"), dtype=torch.float32)
    else:
        Collator(ours)
        Collator(ours)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", None)
    monkeypatch.setattr(padding, "real_spans", None)
    ours(**packed_inputs(random_tokens(12), (5, 7)), use_cache=False)

    assert len(ours.base_model._forward_pre_hooks) == 1 + (made == "load")


def test_only_the_first_layer_waits_for_the_device(tmp_path, monkeypatch):
    _, ours = pair("llama", tmp_path)
    tokens, mask = padded(PADDINGS["both"])
    counted = []
    read = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: counted.append(1) or read(tensor))
    ours(input_ids=tokens, attention_mask=mask, use_cache=False)

    assert len(counted) == 1


# Other people's trainers


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_padding_collator_in_the_trainer_gives_the_losses_of_eager_attention(side, tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.convert_ids_to_tokens(0), side
    texts = [random_tokens(length, seed)[0].tolist() for seed, length in enumerate((5, 12, 9, 3, 14, 7))]
    losses = []
    for model in pair("qwen2", tmp_path):
        args = TrainingArguments(
            str(tmp_path / "out"),
            use_cpu=True,
            report_to=[],
            per_device_train_batch_size=3,
            num_train_epochs=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        data = [{"input_ids": text, "labels": [-100, *text[1:]]} for text in texts]
        trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=DataCollatorForSeq2Seq(tokenizer))
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
