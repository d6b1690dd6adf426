"""The checks pass on models as they are; all families in the slow test."""

import json
import math
import subprocess
import sys

import pytest
import torch

from unspool.core.errors import ConfigError
from unspool.models.attention.cuda import dense_from
from unspool.verification.case import Check, Measured, SkippedError, build_case, error_line
from unspool.verification.fixtures import FAMILIES, SHAPE, WIDE, ModelSpec, build_small_models, build_steps, row_len
from unspool.verification.ground_truth import STEP, Outcome, compare, gradient_errors
from unspool.verification.run import PROMISES, build_checks, run_check, run_checks
from unspool.verification.tolerance import FP32, tolerance_for

# What says nothing about the model is in test_killed.py.
CHECKS = [name for name, check in build_checks(None).items() if not check.once]


def assert_all_passed(found):
    assert found
    assert not [result for result in found if result.status != "passed"]
    assert all(result.error <= result.tolerance for result in found)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3+harpe"])
def test_promises_hold_for(family, check, case, results):
    assert_all_passed(results(check, case(family)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_promise_holds_for_every_small_family(family, case, results):
    for check in CHECKS:
        assert_all_passed(results(check, case(family)))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_every_promise_holds_on_a_gpu(family):
    """In a new process: torch's first call of SDPA decides which kernels plain `transformers` uses later."""
    command = [sys.executable, "-m", "unspool.cli.main", "verify", "--device", "cuda", "--model", family, "--json"]
    done = subprocess.run(
        [*command, *(f"--only={name}" for name in CHECKS)], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    shown = ("check", "status", "error", "tolerance", "detail")
    bad = [[result[key] for key in shown] for result in found if result["status"] != "passed"]
    assert not bad, bad
    assert {result["check"] for result in found} == set(CHECKS)


# What is put to the test


def test_the_models_for_a_gpu_can_be_built_without_one(tmp_path):
    for spec in build_small_models(tmp_path, seed=0, wide=True, names=FAMILIES):
        config = spec.load_ours(torch.device("cpu"), bf16=False).config
        assert config.hidden_size == WIDE["hidden_size"]


def test_every_promise_has_a_check():
    assert {check.promise for check in build_checks(None).values()} == set(PROMISES)


def test_windows_are_shorter_than_the_documents_they_are_to_cut():
    for family in ("mistral", "gemma2", "gemma3"):
        assert FAMILIES[family].changes["sliding_window"] < row_len(10**5, torch.device("cpu")) // 4


def test_rows_on_a_gpu_are_long_enough_for_the_kernel_of_long_documents():
    (row,) = build_steps(row_len(10**7, torch.device("cuda")), vocabulary=256, seed=0)["unequal"].rows
    limit = dense_from(SHAPE["num_attention_heads"], WIDE["head_dim"])
    assert limit is not None
    assert sorted(row.doc_lens)[-2] < limit <= max(row.doc_lens)


@pytest.mark.parametrize("family", ["phi3", "llama+dynamic"])
def test_rows_have_documents_on_both_sides_of_a_methods_threshold(family, case):
    found = case(family)
    parameters = found.model.config.rope_parameters
    original = parameters.get("original_max_position_embeddings") or found.model.config.max_position_embeddings
    for step in found.steps.values():
        lens = [length for row in step.rows for length in row.doc_lens.tolist()]
        assert max(lens) > original
        assert step.name == "equal" or min(lens) <= original
        assert len(step.rows) == 1 or step.row_len // 2 <= original, "half of a row, which is a rank's, is not beyond"
    for step, loss in found.plain.items():
        assert loss.gradient < 1e-5, f"{step}: the reference itself would differ by more than rounding"


def test_documents_differ_in_length_and_rows_in_their_number_of_targets():
    steps = build_steps(192, vocabulary=256, seed=0)
    assert len(set(steps["unequal"].rows[0].doc_lens.tolist())) == 4
    assert 1 in steps["unequal"].rows[0].doc_lens
    shares = [1.0 if row.loss_mask is None else row.loss_mask.mean() for row in steps["several"].rows]
    assert max(shares) > 4 * min(shares)
    assert [(name, step.row_len, len(step.rows)) for name, step in steps.items()] == [
        ("unequal", 192, 1),
        ("equal", 192, 1),
        ("several", 48, 8),
    ]


def test_large_models_get_short_rows():
    cpu = torch.device("cpu")
    assert row_len(10**5, cpu) > row_len(200_000_000, cpu) >= row_len(8 * 10**9, cpu) == 64


def test_the_same_seed_gives_the_same_model_and_another_seed_another(tmp_path):
    def weights(folder: str, seed: int) -> torch.Tensor:
        (subject,) = build_small_models(tmp_path / folder, seed=seed, wide=False, names=["llama"])
        return subject.load_plain(torch.device("cpu")).lm_head.weight

    assert torch.equal(weights("a", 0), weights("b", 0))
    assert not torch.equal(weights("a", 0), weights("c", 1))


# Measuring


def test_a_lost_gradient_is_an_error_of_one_and_a_tiny_one_is_not_blown_up():
    wanted = {"large": torch.full((4,), 10.0), "tiny": torch.full((4,), 1e-9)}

    assert max(gradient_errors({**wanted, "large": torch.zeros(4)}, wanted)) == (1.0, "large")
    error, name = max(gradient_errors({**wanted, "tiny": torch.zeros(4)}, wanted))
    assert (name, error < FP32) == ("tiny", True)


def test_one_weight_in_which_terms_cancel_does_not_hide_a_small_mistake_in_all_others():
    """As in SmolLM2: one norm is off by 2.9e-3 for everybody, half of the weights by 5e-5."""
    wanted = {f"{number}": torch.full((4,), 1.0) for number in range(9)}
    outcome = lambda errors: Outcome(  # noqa: E731
        {STEP: 1.0},
        {STEP: {name: grad * (1 + error) for (name, grad), error in zip(wanted.items(), errors, strict=True)}},
    )
    truth = outcome([0.0] * 9)
    plain = compare(outcome([2.9e-3] + [5e-5] * 8), truth)
    ours = compare(outcome([2.8e-3] + [6e-5] * 8), truth)
    wrong = compare(outcome([2.8e-3] + [1e-3] * 8), truth)

    assert (ours.gradient <= 1.5 * plain.gradient, ours.median <= 1.5 * plain.median) == (True, True)
    assert (wrong.gradient <= 1.5 * plain.gradient, wrong.median <= 1.5 * plain.median) == (True, False)


@pytest.mark.parametrize(
    ("plain_error", "dtype", "wanted"),
    [(1e-7, "fp32", 1e-5), (1e-4, "fp32", 1.5e-4), (1.0, "fp32", 1e-3), (1e-2, "bf16", 1.5e-2), (0.0, "bf16", 0.0)],
)
def test_the_error_of_plain_transformers_sets_the_tolerance_within_limits(plain_error, dtype, wanted):
    assert tolerance_for(plain_error, dtype) == pytest.approx(wanted)


@pytest.mark.parametrize(("error", "status"), [(0.5, "passed"), (1.0, "passed"), (1.1, "failed"), (math.nan, "failed")])
def test_an_error_passes_up_to_its_tolerance_and_never_when_it_is_not_a_number(error, status, case):
    measured = Measured(quantity="x", error=error, tolerance=1.0)
    check = Check(name="x", promise=1, what="", measure=lambda _: [measured])

    assert run_check(check, case("llama"))[0].status == status


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (SkippedError("no such thing"), "skipped"),
        (ConfigError("no such thing"), "skipped"),
        (RuntimeError("no such thing\nand more"), "failed"),
    ],
)
def test_skipped_checks_have_no_number_but_a_reason(problem, status, case):
    def measure(_):
        raise problem

    (result,) = run_check(Check(name="x", promise=1, what="", measure=measure), case("llama"))

    assert (result.status, result.error, result.tolerance, result.detail) == (status, None, None, "no such thing")


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("Traceback …\n  File …\nValueError: no such thing\n", "ValueError: no such thing"),
        (
            "[rank1]: torch.AcceleratorError: CUDA error: invalid argument\n[rank1]: For debugging consider …\n\n",
            "torch.AcceleratorError: CUDA error: invalid argument",
        ),
        ("RuntimeError: first\n\nDuring handling …\nKeyError: 'second'\nW1115 a word after it", "KeyError: 'second'"),
        ("it went away\n", "it went away"),
        ("", ""),
    ],
)
def test_the_error_of_a_process_is_found_in_its_output(said, wanted):
    assert error_line(said) == wanted


def test_a_mistake_of_ours_is_not_taken_for_a_broken_promise(case):
    def measure(_):
        raise AssertionError

    with pytest.raises(AssertionError):
        run_check(Check(name="x", promise=1, what="", measure=measure), case("llama"))


def test_a_model_that_is_refused_is_skipped_with_the_reason_and_the_next_one_is_checked(tmp_path, plain):
    (good,) = build_small_models(tmp_path, seed=0, wide=False, names=["llama"])
    bad = ModelSpec(name="bad", ref=str(tmp_path / "nowhere"))
    checks = [build_checks(plain)["chunked-loss"]]

    (first,), second = run_checks([bad, good], checks, device=torch.device("cpu"), seed=0)

    assert first.status == "skipped"
    assert "nowhere" in first.detail
    assert_all_passed(second)


def test_building_a_case_twice_gives_the_same_truth(tmp_path):
    (subject,) = build_small_models(tmp_path, seed=0, wide=False, names=["llama"])
    first, second = (build_case(subject, device=torch.device("cpu"), seed=0).truths["several"] for _ in range(2))
    assert first.losses == second.losses
