"""Whatever happens to the files of a half-done evaluation, it ends with the bytes of an undisturbed one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from factory import DAMAGES, damage, die, in_child
from unspool.core.errors import DataError
from unspool.evals import run as run_module
from unspool.evals import suites
from unspool.evals.backends.mock import Oracle
from unspool.evals.judge.run import Judge, JudgeReplies, judge_folder
from unspool.evals.reply_cache import ReplyCache
from unspool.evals.run import Scoring, score
from unspool.evals.suites.ruler import RulerEval

from .toy import TOY, entry

FILES = ("samples.jsonl", "summary.json", "prompts.jsonl")


@pytest.fixture(scope="module", autouse=True)
def toy():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(suites.SUITES, "ruler", TOY)
        yield


def scoring_in(folder: Path, **options) -> Scoring:
    return Scoring(model="base", model_hash="m", evals=[entry(**options)], seed=0, out_dir=folder / "base", root=folder)


class Dying(Oracle):
    """Ends the process after some answers."""

    left = 6

    def answers(self, prompt):
        self.left -= 1
        return super().answers(prompt) if self.left else die()


@pytest.fixture(scope="module")
def places(tmp_path_factory, tokenizer) -> tuple[Path, Path]:
    killed, whole = tmp_path_factory.mktemp("killed"), tmp_path_factory.mktemp("whole")
    assert in_child(lambda: score(scoring_in(killed), Dying(tokenizer))) == -9
    score(scoring_in(whole), Oracle(tokenizer))
    return killed, whole


class Counting(Oracle):
    asked = 0

    def answers(self, prompt):
        found = super().answers(prompt)
        self.asked += len(found)
        return found


@pytest.mark.parametrize(
    "kind", ["flip", "edit", *(pytest.param(kind, marks=pytest.mark.slow) for kind in DAMAGES[1:])]
)
@pytest.mark.parametrize(
    "name",
    [
        "samples.jsonl",
        "prompts.jsonl",
        *(pytest.param(f"{name}.jsonl.sums", marks=pytest.mark.slow) for name in ("samples", "prompts")),
    ],
)
def test_damage_to_a_half_done_evaluation_is_noticed(name, kind, places, tokenizer, tmp_path, capsys):
    killed, whole = places
    shutil.copytree(killed / "base.work", tmp_path / "base.work")
    path = tmp_path / "base.work" / name
    if kind == "edit":
        # A line that is as good as any other, with another answer, score or hash.
        content = path.read_text()
        old, new = ('"score": 1.0', '"score": 0.0') if "samples" in name else ('"index": 5', '"index": 6')
        path.write_text(content.replace(old, new, 1) if "sums" not in name else content[:-20] + "\n" * 20)
    else:
        damage(path, kind)
    backend = Counting(tokenizer)

    score(scoring_in(tmp_path), backend)

    for file in FILES:
        assert (tmp_path / "base" / file).read_bytes() == (whole / "base" / file).read_bytes(), file
    assert sorted(path.name for path in (tmp_path / "base").iterdir()) == sorted([*FILES, "manifest.json"])
    said = capsys.readouterr().err
    if kind != "truncate" and (name, kind) not in [("samples.jsonl.sums", "edit"), ("prompts.jsonl.sums", "edit")]:
        assert f"{name.removesuffix('.sums')}: " in said and "recomputing" in said
    if kind == "flip" and name == "samples.jsonl":
        scored = (killed / "base.work" / name).read_bytes().count(b"\n")
        assert scored > 32 and backend.asked <= 96 - scored + 16, "only what was damaged is asked again"


def test_scores_of_a_changed_suite_are_kept_aside(places, tokenizer, tmp_path, capsys):
    killed, _ = places
    shutil.copytree(killed / "base.work", tmp_path / "base.work")
    score(scoring_in(tmp_path, samples=2), Oracle(tokenizer))
    said = capsys.readouterr().err
    assert "scores of base: not using the unfinished work in base.work (" in said
    assert (tmp_path / "base.work.previous" / "samples.jsonl").exists()


def test_a_kill_while_scores_are_sealed_costs_no_answer(tokenizer, tmp_path, monkeypatch):
    def dying() -> None:
        monkeypatch.setattr(run_module, "seal", lambda *args, **rest: die())
        score(scoring_in(tmp_path), Oracle(tokenizer))

    assert in_child(dying) == -9
    backend = Counting(tokenizer)
    score(scoring_in(tmp_path), backend)
    assert backend.asked == 0


# Replies


def write_replies(path: Path, count: int = 6) -> None:
    with ReplyCache(path) as cache:
        for number in range(count):
            cache.write_reply(f"key{number}", f"reply number {number}", judge="j")


@pytest.mark.parametrize("kind", ["flip", "swap", "edit", "truncate", "delete"])
def test_damaged_replies_are_dropped_and_the_others_kept(kind, tmp_path, capsys):
    path = tmp_path / "replies.jsonl"
    write_replies(path)
    if kind == "edit":
        path.write_text(path.read_text().replace("reply number 3", "reply number 8"))
    elif kind == "swap":  # two replies change places, their keys do not
        path.write_text(path.read_text().replace("number 3", "number x"))
        path.write_text(path.read_text().replace("number 4", "number 3").replace("number x", "number 4"))
    elif kind == "flip":
        path.write_bytes(path.read_bytes().replace(b"reply number 3", b"reply number 2"))
    else:
        damage(path, kind)
    with ReplyCache(path) as cache:
        found = {f"key{number}": cache.read_reply(f"key{number}") for number in range(6)}
        for number in range(6):
            cache.write_reply(f"key{number}", f"reply number {number}", judge="j")
    said = capsys.readouterr().err
    for number in range(6):
        assert found[f"key{number}"] in (None, f"reply number {number}")
    lost = [key for key, reply in found.items() if reply is None]
    wanted = {"flip": ["key3"], "edit": ["key3"], "swap": ["key3", "key4"], "truncate": 3, "delete": 6}[kind]
    assert (lost if isinstance(wanted, list) else len(lost)) == wanted
    if isinstance(wanted, list):
        assert f"{len(wanted)} cached replies are damaged" in said
        assert (tmp_path / "replies.jsonl.damaged").read_text().count("\n") == len(wanted)

    with ReplyCache(path) as cache:  # repaired for good
        assert [cache.read_reply(f"key{number}") for number in range(6)] == [f"reply number {at}" for at in range(6)]
    assert capsys.readouterr().err == ""


def test_replies_of_older_versions_are_kept(tmp_path, capsys):
    path = tmp_path / "replies.jsonl"
    path.write_text(json.dumps({"key": "a", "reply": "old"}) + "\n" + '{"key": "b", "repl')
    with ReplyCache(path) as cache:
        assert cache.read_reply("a") == "old"
        cache.write_reply("b", "new")
    with ReplyCache(path) as cache:
        assert [cache.read_reply(key) for key in "ab"] == ["old", "new"]
    assert capsys.readouterr().err == ""


@pytest.fixture
def judged(tmp_path, tokenizer) -> Path:
    config = RulerEval.model_validate({"suite": "ruler", "lengths": [256], "samples": 4, "tasks": ["judged"]})
    scoring = replace(scoring_in(tmp_path), evals=[config])
    score(scoring, Oracle(tokenizer))
    return scoring.out_dir


@pytest.mark.parametrize("kind", ["flip", "truncate", "delete", "swap", "edit"])
def test_damage_to_a_judges_replies_changes_no_score(kind, judged, tmp_path):
    asked = []

    def ask(prompt: str) -> str:
        asked.append(prompt)
        return '{"fluency": 1, "correctness": 3}'

    path = judged.with_name("base.judgements.jsonl")
    from unspool.evals.judge.run import _calls, read_samples

    with JudgeReplies(path, "j") as replies:
        for call in _calls(read_samples(judged)):
            replies.add(call.prompt, ask(call.prompt))
    if kind == "edit":
        path.write_text(path.read_text().replace('correctness\\": 3', 'correctness\\": 0', 2))
    else:
        damage(path, kind)

    summary = judge_folder(judged, Judge(name="j", ask=ask))

    assert {cell["value"] for cell in summary["cells"] if cell["n"]} == {1.0}


def test_damaged_answers_are_not_judged(judged):
    damage(judged / "samples.jsonl", "flip")
    before = (judged / "manifest.json").read_bytes()
    with pytest.raises(DataError, match=r"file samples\.jsonl has changed; score the model again before"):
        judge_folder(judged, Judge(name="j", ask=lambda prompt: pytest.fail("asked")))
    assert (judged / "manifest.json").read_bytes() == before
