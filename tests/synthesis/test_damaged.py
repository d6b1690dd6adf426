"""Whatever happens to the files of a half-done set of conversations, it ends with the bytes of an undisturbed one."""

import shutil
from pathlib import Path

import pytest

from factory import DAMAGES, damage, die, in_child
from unspool.synthesis import run as synth_run

from .test_killed import digests, run
from .toy import MOCK, write_documents, write_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> tuple[Path, Path]:
    killed, whole = tmp_path_factory.mktemp("killed"), tmp_path_factory.mktemp("whole")
    for folder in (killed, whole):
        write_documents(folder / "docs.jsonl", 40)
        write_recipe(folder, {"generator": {**MOCK, "faults": {"unsupported": 0.1}}})

    def work() -> None:
        real = synth_run.Journal.add

        def add(self, entry, example) -> None:
            real(self, entry, example)
            if len(self.entries) == 20:
                die()

        synth_run.Journal.add = add
        run(str(killed / "recipe.yaml"))

    assert in_child(work) == -9
    run(str(whole / "recipe.yaml"))
    return killed, whole


@pytest.mark.parametrize("kind", [*DAMAGES, "edit"])
@pytest.mark.parametrize(
    "name", ["synth/long.work/journal.jsonl", "synth/long.work/examples.jsonl", "replies/synth.jsonl"]
)
def test_damage_to_half_done_conversations_is_noticed(name, kind, places, tmp_path, capsys):
    killed, whole = places
    folder = shutil.copytree(killed, tmp_path / "here")
    write_recipe(folder, {"generator": {**MOCK, "faults": {"unsupported": 0.1}}})
    path = folder / "run" / name
    if kind == "edit":
        content = path.read_bytes()
        place = content.index(b" ", len(content) // 3)
        path.write_bytes(content[:place] + b"x" + content[place + 1 :])
    else:
        damage(path, kind)

    run(str(folder / "recipe.yaml"))

    assert digests(folder / "run/synth/long") == digests(whole / "run/synth/long")
    said = capsys.readouterr().err
    if kind in ("flip", "edit") or (kind == "swap" and "replies" not in name):
        assert "damaged" in said
