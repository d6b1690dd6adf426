"""A plan on other numbers of GPUs, and what it assumes."""

from dataclasses import replace

import pytest

from unspool.planning.cost import find_gpu
from unspool.planning.fit import GIB, Machine
from unspool.planning.projection import Projection, assumptions, project
from unspool.planning.recipe_plan import Plan, plan_recipe
from unspool.recipe.load import load_recipe


@pytest.fixture(scope="module")
def eight() -> Plan:
    machine = Machine(gpu=find_gpu("h200"), count=8, host=1024.0 * GIB)
    return plan_recipe(load_recipe("prolong-64k"), machine)


@pytest.fixture(scope="module")
def projected(eight: Plan) -> list[Projection]:
    return list(project(eight, (8, 64, 512)))


def test_on_as_many_gpus_it_is_the_plan_itself(eight: Plan, projected: list[Projection]) -> None:
    first, chosen = projected[0], eight.stages[0].chosen
    assert chosen is not None
    assert (first.layout, first.mfu, first.step_seconds) == (chosen.layout, eight.stages[0].mfu, chosen.seconds.step)
    assert first.peak_gib * GIB == chosen.device_bytes
    assert first.tokens_per_second * 8 == pytest.approx(first.batch_tokens / first.step_seconds)


def test_more_gpus_hold_smaller_shards_and_never_speed_each_other_up(projected: list[Projection]) -> None:
    assert [one.gpus for one in projected] == [8, 64, 512]
    for one in projected:
        layout = one.layout
        assert layout.replicate * layout.shard * layout.ring * layout.ulysses == one.gpus
        assert one.origins["mfu"] == "modeled"
    assert projected[1].peak_gib < projected[0].peak_gib


def test_what_fits_nowhere_is_left_out() -> None:
    machine = Machine(gpu=find_gpu("l4"), count=1, host=16.0 * GIB)
    plan = plan_recipe(load_recipe("prolong-64k"), machine)
    assert list(project(plan, (1,))) == []


def test_slower_links_lower_the_projection(eight: Plan) -> None:
    slow = list(project(eight.on_links(inside=2, between=0.5), (512,)))
    [fast] = project(eight, (512,))
    assert slow[0].tokens_per_second < fast.tokens_per_second
    assert slow[0].waiting_seconds > fast.waiting_seconds


def test_assumptions_name_rates_links_and_batch(eight: Plan) -> None:
    text = " ".join(assumptions(eight))
    for part in ("fitted to steps measured on one NVIDIA H200", "360 GB/s", "assumed", "4M tokens", "stragglers"):
        assert part in text
    given = replace(eight, machine=replace(eight.machine, link=300.0, network=25.0))
    assert "300 GB/s" in " ".join(assumptions(given)) and "(given)" in " ".join(assumptions(given))
