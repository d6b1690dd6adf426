# ruff: noqa: F811
"""Whatever happens to the files of a half-trained stage, it ends with the numbers of an undisturbed one."""

import json
import shutil
from pathlib import Path

import pytest

from factory import DAMAGES, damage, in_child
from unspool.training.distill.distill import FILE, WEIGHTS
from unspool.training.loader import LEDGER
from unspool.training.metrics.logger import METRICS, SAMPLES, VALIDATION

from .stage_runs import assert_same_result, kill_after_step, run
from .test_distill import FROZEN, distilled, inputs  # noqa: F401
from .test_stage_logged import WATCHED, lines, watched_materials  # noqa: F401

pytestmark = pytest.mark.slow


def half_trained(place: Path, *args) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        kill_after_step(5)(patch.setattr)
        assert in_child(lambda: run(args[0], place / "one", args[1])) == -9
    return place


@pytest.fixture(scope="module")
def watched(watched_materials, tmp_path_factory) -> tuple[Path, Path]:
    whole = tmp_path_factory.mktemp("whole")
    run(watched_materials, whole / "one", WATCHED)
    return half_trained(tmp_path_factory.mktemp("killed"), watched_materials, WATCHED), whole


@pytest.mark.parametrize("kind", [*DAMAGES, "edit"])
@pytest.mark.parametrize("name", [LEDGER, METRICS, VALIDATION, SAMPLES])
def test_damage_to_the_logs_of_unfinished_training_changes_no_result(
    name,
    kind,
    watched,
    watched_materials,
    tmp_path,
    capsys,
):
    killed, whole = watched
    shutil.copytree(killed / "one.work", tmp_path / "one.work")
    path = tmp_path / "one.work" / name
    if kind == "edit":
        records = [json.loads(line) for line in path.read_text().splitlines()]
        records[1] |= {"loss": 0.5} if name in (METRICS, VALIDATION) else {"text": "nonsense", "rows": []}
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        damage(path, kind, at=0.1)

    run(watched_materials, tmp_path / "one", WATCHED)

    assert "resuming after step 4" in capsys.readouterr().err
    assert_same_result(tmp_path / "one", whole / "one")
    for log in (VALIDATION, SAMPLES):
        assert lines(tmp_path / "one" / log) == lines(whole / "one" / log)


@pytest.mark.parametrize("kind", DAMAGES[:3])
@pytest.mark.parametrize("name", ["state.json", LEDGER, VALIDATION, "shard-00001-model-00001-of-00001.safetensors"])
def test_damage_to_a_checkpoint_is_rolled_back(name, kind, watched, watched_materials, tmp_path, capsys):
    killed, whole = watched
    shutil.copytree(killed / "one.work", tmp_path / "one.work")
    damage(tmp_path / "one.work" / "checkpoints" / "step-000004" / name, kind)

    run(watched_materials, tmp_path / "one", WATCHED)

    said = capsys.readouterr().err
    assert "checkpoint step-000004 is damaged" in said and "resuming after step 2" in said
    assert_same_result(tmp_path / "one", whole / "one")
    for log in (VALIDATION, SAMPLES):
        assert lines(tmp_path / "one" / log) == lines(whole / "one" / log)


@pytest.fixture(scope="module")
def half_distilled(inputs, tmp_path_factory) -> Path:
    return half_trained(tmp_path_factory.mktemp("distilled"), inputs, FROZEN)


@pytest.mark.parametrize("kind", [*DAMAGES[:3], "edit"])
@pytest.mark.parametrize("name", [WEIGHTS, FILE])
def test_damage_to_a_half_done_distillation_is_noticed(
    name,
    kind,
    half_distilled,
    inputs,
    distilled,
    tmp_path,
    capsys,
):
    shutil.copytree(half_distilled / "one.work", tmp_path / "one.work")
    path = tmp_path / "one.work" / name
    if kind == "edit":
        content = path.read_bytes()
        path.write_bytes(content.replace(b'"step": 2', b'"step": 7') if name == FILE else content[:-1] + b"\1")
    else:
        damage(path, kind, at=0.9)

    run(inputs, tmp_path / "one", FROZEN)

    assert_same_result(tmp_path / "one", distilled["frozen"])
    assert lines(tmp_path / "one" / FILE) == lines(distilled["frozen"] / FILE)
    if (name, kind) != (WEIGHTS, "delete"):
        assert "the result of distillation before training is damaged; repeating it" in capsys.readouterr().err
