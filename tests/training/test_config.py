import pytest
from pydantic import ValidationError

from factory import build_stage
from unspool.rope.methods import Unchanged


def test_sizes_and_defaults_are_read():
    stage = build_stage(context_length="1K", batch_tokens="4K", tokens="1M")

    assert (stage.context_length, stage.batch_tokens, stage.steps) == (1024, 4096, 256)
    assert stage.rope == Unchanged()
    assert stage.init == "previous"


def test_a_last_step_that_would_not_be_full_is_left_out():
    assert build_stage(tokens=64 * 3 + 63).steps == 3


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"batch_tokens": 48}, r"batch_tokens must be a multiple of context_length \(32 tokens\)"),
        ({"micro_batch_tokens": 48}, "micro_batch_tokens must be a multiple of context_length and divide batch_tokens"),
        (
            {"batch_tokens": 96, "micro_batch_tokens": 64},
            "micro_batch_tokens must be a multiple of context_length and divide batch_tokens",
        ),
        ({"tokens": 32}, "tokens must be at least one batch"),
        ({"mix": {}}, "every share must be above 0"),
        ({"mix": {"long": 0}}, "every share must be above 0"),
        ({"lr": 0}, "greater than 0"),
        ({"lr_overrides": {"mlp": -1e-3}}, "give substrings of parameter names with an lr of 0 or more"),
        ({"export_context_length": 64}, "export_context_length must not exceed context_length"),
        (
            {"export_context_length": 16, "rope": {"method": "yarn"}},
            "export_context_length cannot be below context_length with method yarn",
        ),
        (
            {"attention_distillation": {"datasets": "short", "before": 8, "lr": 1e-3}},
            r"attention_distillation\.before has no effect while rope is unchanged",
        ),
        (
            {"attention_distillation": {"datasets": "short", "lr": 1e-3}},
            r"set before or after \(steps\) or during \(a weight\)",
        ),
        (
            {"attention_distillation": {"datasets": {"short": 0}, "after": 8, "lr": 1e-3}},
            "give a dataset, or datasets with shares above 0",
        ),
        (
            {"attention_distillation": {"datasets": "", "after": 8, "lr": 1e-3}},
            "give a dataset, or datasets with shares above 0",
        ),
        (
            {"attention_distillation": {"datasets": "short", "after": 8}},
            "set lr, the peak learning rate of its own steps",
        ),
        (
            {"attention_distillation": {"datasets": "held", "after": 8, "lr": 1e-3}, "validation": {"dataset": "held"}},
            r"validation\.dataset held is in attention_distillation\.datasets",
        ),
        ({"warmup_ratio": 1}, "less than 1"),
        ({"name": "../out"}, "pattern"),
        ({"attention": "window"}, "'intra_document' or 'full'"),
        ({"learning_rate": 1}, "Extra inputs"),
    ],
)
def test_impossible_stages_are_refused(changes, wanted):
    with pytest.raises(ValidationError, match=wanted):
        build_stage(**changes)


def test_a_distillation_has_shares_and_a_smaller_rate_after_training():
    distillation = build_stage(
        attention_distillation={"datasets": "short", "after": 8, "lr": 4e-3}
    ).attention_distillation

    assert (distillation.shares, distillation.lr_after, distillation.before) == ({"short": 1.0}, 1e-3, 0)
    assert (
        build_stage(
            attention_distillation={"datasets": {"a": 3, "b": 1}, "after": 8, "lr": 1, "after_lr": 2}
        ).attention_distillation.lr_after
        == 2
    )
