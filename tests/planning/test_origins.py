"""What a plan says of its numbers: measured, fitted or modeled, and the bandwidths between GPUs."""

import math
from dataclasses import asdict
from typing import Any

import pytest

from unspool.core.errors import ConfigError
from unspool.planning.calibration import Calibration
from unspool.planning.cost import find_gpu
from unspool.planning.fit import Machine
from unspool.planning.origins import FITTED, LEGEND, MEASURED, MODELED, number_origins
from unspool.planning.recipe_plan import Plan, as_plain, plan_recipe
from unspool.recipe.load import load_recipe


def planned(gpu: str = "h200", count: int = 1, overrides: tuple[str, ...] = (), **given: Any) -> Plan:
    return plan_recipe(load_recipe("prolong-64k", overrides), Machine(gpu=find_gpu(gpu), count=count, **given))


@pytest.fixture(scope="module")
def eight() -> Plan:
    return planned(count=8)


def calibration(plan: Plan) -> Calibration:
    return Calibration(
        device="NVIDIA H200",
        gpu="h200",
        versions="torch",
        shape=plan.model.shape,
        tokens=1024,
        document_len=1024,
        layers=1.1,
        rest=1.0,
        activations=1.0,
        seconds=(1.0, 2.0),
        num_layers=(2, 4),
    )


def test_every_number_of_an_estimate_has_an_origin(eight: Plan) -> None:
    chosen = as_plain(eight)["stages"][0]["chosen"]
    origins = chosen["origins"]
    numbers = {f"seconds.{name}" for name in chosen["seconds"]}
    numbers |= {f"memory.{name}" for name in ("device", "host")}
    numbers |= {"tokens_per_second", "hours", "gpu_hours", "mfu"}
    assert set(origins) == numbers
    assert set(origins.values()) <= set(LEGEND)


def test_several_gpus_compute_at_fitted_rates_and_wait_by_a_model(eight: Plan) -> None:
    chosen = eight.stages[0].chosen
    assert chosen is not None
    origins = number_origins(chosen, None)
    assert origins["seconds.matmul"] == FITTED
    assert origins["seconds.waiting"] == origins["seconds.step"] == origins["mfu"] == MODELED
    text = str(eight)
    assert "links  360 GB/s per GPU inside a machine of 8 (assumed: 80% of the data sheet; set it with --link)" in text
    assert "40 GB/s between machines (assumed: 80% of a 400 Gbit/s card; set it with --network)" in text
    assert "terms  fitted: " in text and "measured: steps of a few layers" not in text, "only terms that occur"
    assert "s of waiting modeled; step, time and MFU modeled" in text


def test_one_gpu_is_fitted_and_has_no_links() -> None:
    plan = planned()
    chosen = plan.stages[0].chosen
    assert chosen is not None
    assert number_origins(chosen, None)["seconds.step"] == FITTED
    assert as_plain(plan)["machine"]["links"] is None
    assert "links  " not in str(plan) and "origins  " not in str(plan)


def test_a_gpu_that_was_never_used_is_modeled() -> None:
    chosen = planned("h100", 8).stages[0].chosen
    assert chosen is not None
    assert set(number_origins(chosen, None).values()) == {MODELED}


def test_layers_timed_here_are_measured_and_links_still_are_not(eight: Plan) -> None:
    chosen = eight.stages[0].chosen
    assert chosen is not None
    origins = number_origins(chosen, calibration(eight))
    assert (origins["seconds.matmul"], origins["memory.device"], origins["seconds.step"]) == (MEASURED, FITTED, MODELED)


def test_given_links_count_and_everything_else_stays(eight: Plan) -> None:
    slow = eight.on_links(inside=2, between=1)
    links = as_plain(slow)["machine"]["links"]
    assert (links["inside_gb_per_s"], links["inside_origin"], links["between_origin"]) == (2, "given", "given")
    assert "(given)" in str(slow)
    first, second = eight.stages[0].written, slow.stages[0].written
    assert first is not None and second is not None
    assert second.seconds.waiting > first.seconds.waiting
    assert second.footprint == first.footprint
    assert {k: v for k, v in asdict(second.seconds).items() if k != "waiting"} == {
        k: v for k, v in asdict(first.seconds).items() if k != "waiting"
    }


def test_without_limits_nobody_waits(eight: Plan) -> None:
    found = eight.on_links(inside=math.inf, between=math.inf).stages[0].chosen
    assert found is not None and found.seconds.waiting == 0


def test_a_calibration_stays_when_links_change(eight: Plan) -> None:
    loaded, machine = eight.loaded, eight.machine
    plan = plan_recipe(loaded, machine, measured=calibration(eight))
    assert plan.on_links(inside=100).rates == plan.rates
    assert plan.rates.startswith("measured: ")


def test_a_given_bandwidth_stays_when_the_other_changes() -> None:
    plan = planned().on_links(inside=200).on_links(between=5)
    assert (plan.machine.link, plan.machine.network) == (200, 5)
    assert "links  200 GB/s per GPU inside a machine of 8 (given), 5 GB/s between machines (given)" in str(plan)


@pytest.mark.parametrize("wrong", [0, -1, math.nan])
def test_impossible_bandwidths_are_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match=r"`inside=.*`: a bandwidth must be above 0 GB/s"):
        planned().on_links(inside=wrong)


def test_fp8_is_modeled_because_no_step_was_measured() -> None:
    plan = planned(overrides=("stages.0.precision=fp8", "stages.0.batch_tokens=64K"))
    chosen = plan.stages[0].chosen
    assert chosen is not None and chosen.stage.precision == "fp8"
    assert set(number_origins(chosen, None).values()) == {MODELED}
    assert set(number_origins(chosen, calibration(plan)).values()) == {MODELED}
    assert "precision  fp8 modeled: linear layers 1.63 times as fast" in str(plan)
    assert "precision  fp8" not in str(planned())


@pytest.mark.parametrize(
    ("gpu", "count", "reason"),
    [
        ("a100", 1, "compute capability 8.9 or newer, and the NVIDIA A100 80GB is older; set precision to bf16"),
        ("h200", 8, "precision fp8 is not supported on several devices yet; set it to bf16"),
    ],
)
def test_a_plan_refuses_machines_without_fp8(gpu: str, count: int, reason: str) -> None:
    plan = planned(gpu, count, ("stages.0.precision=fp8",))
    assert not plan.fits
    assert reason in str(plan.stages[0].problem)
