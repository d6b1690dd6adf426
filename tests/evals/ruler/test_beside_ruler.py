"""`reference` mode beside RULER's own generators: RULER's texts in ours, our words, prose and questions in RULER's.

Runs if UNSPOOL_RULER names a checkout of https://github.com/NVIDIA/RULER. Both search the haystack size with random
prompts, so sizes and lengths agree up to that chance, not exactly.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from unspool.evals.suite import Ask
from unspool.evals.suites.ruler import SUITE
from unspool.evals.wording import Wording

CHECKOUT = os.environ.get("UNSPOOL_RULER", "")
TOKENIZER = str(files("unspool") / "assets" / "tiny-base")
SAMPLES, SEED = 12, 42
# By task: how far the searched sizes may differ, as a share. In vt nearly all prompts of a size have the same length,
# so the search finds nearly the same size; fwe grows in steps of that share.
TASKS = {
    "vt": 0.01,
    "niah_single_1": 0.01,
    "niah_single_2": 0.03,
    "niah_multikey_2": 0.03,
    "niah_multikey_3": 0.03,
    "cwe": 0.03,
    "fwe": 0.1,
    "qa_1": 0.1,
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="UNSPOOL_RULER names no checkout of NVIDIA/RULER"),
]


@pytest.fixture(scope="module")
def ruler(tmp_path_factory: pytest.TempPathFactory, squad_file: Path, sources: Any) -> Path:
    """Copy RULER's generators, and put our words, prose and questions where it expects its downloads."""
    folder = tmp_path_factory.mktemp("ruler") / "data"
    shutil.copytree(Path(CHECKOUT) / "scripts" / "data", folder)
    (folder / "words.txt").write_text("\n".join(sources.words), encoding="utf-8")
    # The needle tasks of RULER list all pairs of words, which would not fit in memory.
    (folder / "few_words.txt").write_text("\n".join(sources.words[::6]), encoding="utf-8")
    data = folder / "synthetic" / "json"
    (data / "PaulGrahamEssays.json").write_text(json.dumps({"text": " ".join(sources.essay.words)}))
    (data / "english_words.json").write_text(json.dumps(dict(enumerate(sources.words))))
    shutil.copy(squad_file, data / "squad.json")
    return folder


def word_list(ruler: Path, task: str) -> Path:
    return ruler / ("few_words.txt" if task.startswith("niah") else "words.txt")


def configuration(ruler: Path, task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return RULER's arguments of a task, and its texts."""
    customized = yaml.safe_load((Path(CHECKOUT) / "scripts" / "synthetic.yaml").read_text())[task]
    return customized, runpy.run_path(str(ruler / "synthetic" / "constants.py"))["TASKS"][customized["task"]]


def generate(ruler: Path, task: str, length: int, out: Path) -> tuple[int, list[int]]:
    """Return the haystack size that RULER found, and the lengths of its samples."""
    customized, base = configuration(ruler, task)
    options = {
        "save_dir": out,
        "save_name": task,
        "tokenizer_path": TOKENIZER,
        "tokenizer_type": "hf",
        "max_seq_length": length,
        "tokens_to_generate": base["tokens_to_generate"],
        "num_samples": SAMPLES,
        "random_seed": SEED,
        "template": base["template"] + base["answer_prefix"],
        **customized["args"],
    }
    runner = [sys.executable, str(Path(__file__).parent / "run_ruler.py"), str(ruler), customized["task"]]
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [*runner, str(word_list(ruler, task)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = (out / task / "validation.jsonl").read_text().splitlines()
    (size,) = re.findall(r"Final optimal haystack size .*: (\d+)|Arguments: \((\d+),\)", done.stderr)[-1:]
    return int("".join(size)), [json.loads(row)["length"] for row in rows]


def rulers_texts(ruler: Path, task: str) -> dict[str, str]:
    """Return RULER's texts as a wording of ours."""
    customized, base = configuration(ruler, task)
    texts = {"template": base["template"], "answer_prefix": base["answer_prefix"]}
    niah = (ruler / "synthetic" / "niah.py").read_text()
    if task.startswith("niah"):
        texts["needle"] = re.findall(r'^needle = "(.*)"$', niah, flags=re.MULTILINE)[0]
        singular = {"Some": "A", "are all": "is", "are": "is"}  # RULER's own replacements for one needle
        for plural, single in singular.items():
            texts = {name: text.replace(plural, single) for name, text in texts.items()}
    if customized["args"].get("type_haystack") == "noise":
        texts["noise"] = re.findall(r'haystack = "(.*)"$', niah, flags=re.MULTILINE)[0]
    return texts


@pytest.mark.parametrize("length", [4096, 16384, 65536])
@pytest.mark.parametrize("task", TASKS)
def test_sizes_and_lengths_are_those_of_ruler(
    ruler: Path, shipped_tokenizer: Any, tmp_path: Path, task: str, length: int
) -> None:
    size, lengths = generate(ruler, task, length, tmp_path)

    paths = {"words": str(word_list(ruler, task)), "squad": str(ruler / "synthetic" / "json" / "squad.json")}
    wording = Wording(forms=SUITE.wording, given={task: rulers_texts(ruler, task)}, source="RULER")
    sources = SUITE.load(shipped_tokenizer, paths, wording)
    asks = [Ask(length=length, seed=SEED, index=index, mode="reference") for index in range(SAMPLES)]
    asked = [SUITE.tasks[task].build(sources, ask) for ask in asks]
    ours = [sources.count(one.context + one.question + one.prefix) + SUITE.tasks[task].answer_tokens for one in asked]
    our_size = max(one.meta["size"] for one in asked)

    print(f"{task} {length}: size {size} and {our_size}, mean length {fmean(lengths):.1f} and {fmean(ours):.1f}")
    assert max(lengths) <= length
    assert max(ours) <= length
    assert abs(our_size - size) <= max(1, TASKS[task] * size)
    if task == "vt":
        assert abs(fmean(ours) - fmean(lengths)) <= 0.005 * length
