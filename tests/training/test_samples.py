"""What a model writes while it trains."""

import pytest
import torch

from factory import build_model, build_stage, build_tokenizer
from unspool.core.errors import ConfigError
from unspool.training.metrics.validation import build_samples, escape


def sampling(prompts, model=None, **options):
    stage = build_stage(context_length=64, batch_tokens=64, samples={"prompts": prompts, "tokens": 6, **options})
    model = model or build_model()
    return build_samples(stage, model, build_tokenizer()).write(model)


def test_each_prompt_gets_its_most_likely_continuation():
    model, tokenizer = build_model(), build_tokenizer()
    prompts = ["the river runs", "past"]

    written = sampling(prompts, model)

    assert [sample["prompt"] for sample in written] == prompts
    for prompt, sample in zip(prompts, written, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert sample["text"] == tokenizer.decode(ids[-6:], skip_special_tokens=True)


def test_nothing_is_written_after_the_end_of_a_text():
    model = build_model()
    end = build_tokenizer().eos_token_id
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.lm_head.register_forward_hook(lambda module, args, out: out.index_fill(-1, torch.tensor([end]), 1.0))
    assert sampling(["the river"], model) == [{"prompt": "the river", "text": ""}]


def test_a_prompt_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"the sample prompt the river the .*… has \d+ tokens; with 6 generated"):
        sampling(["the river " * 40])


def test_a_stage_needs_at_least_one_prompt():
    with pytest.raises(ValueError, match="at least 1 item"):
        build_stage(samples={"prompts": []})


def test_what_a_model_writes_cannot_move_the_cursor():
    assert escape("a\nb\x1b[2J\u202eé\t[bold]") == "a\\nb\\x1b[2J\\u202eé\\t[bold]"
    assert escape("x" * 500) == "x" * 399 + "…"
