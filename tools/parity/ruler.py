"""Compare `suite: ruler, reference: CLONE` with RULER's own unchanged scripts.

python tools/parity/ruler.py CLONE [--lengths 4096,16384,65536] [--samples 20] [--words FOLDER] [--data NAME=FILE ...]

CLONE is a clone of https://github.com/NVIDIA/RULER. Its scripts run in a copy, through its own prepare.py. If public
data are missing, both sides read the same stand-in files. If a package is missing, RULER's process and this one import
the same small replacement. The output names both. Three comparisons, by task and length:

prompts  with the same seed, prompts and references byte for byte, built from the clone and read from RULER's files
own      with random draws of our own at RULER's haystack size and permutation: two-sample Kolmogorov-Smirnov tests of
         tokens, places of the references and counts of lines, words or documents
scores   RULER's own post-processing and metric against ours, on mutated answers
"""

import argparse
import contextlib
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

from scipy.stats import ks_2samp
from transformers import AutoTokenizer

from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler import SUITE, published
from unspool.evals.suites.ruler.haystacks import WORD_LISTS, Sources
from unspool.evals.suites.ruler.qa_data import QuestionSet, generate_hotpotqa, generate_squad

SEED, OWN_SEED = 42, "own draws"
JSON = "data/synthetic/json"
# RULER's imports and their replacements if they are not installed.
STUBS = {
    "wonderwords": (
        "import os\nfrom types import SimpleNamespace as N\n"
        "def _read(name):\n"
        "    return [w.rstrip() for w in open(os.path.join(os.environ['RULER_WORDS'], name), encoding='utf-8')]\n"
        "random_word = N(_get_words_from_text_file=_read)\n"
    ),
    "nltk": (
        "import sys\nfrom types import ModuleType, SimpleNamespace as N\n"
        "from unspool.evals.suites.ruler.haystacks import split_sentences\n"
        "data, download = N(find=lambda name: None), lambda name: None\n"
        "tokenize = ModuleType('nltk.tokenize')\ntokenize.sent_tokenize = split_sentences\n"
        "sys.modules['nltk.tokenize'] = tokenize\n"
    ),
    "tenacity": (
        "from unittest.mock import MagicMock\nretry = stop_after_attempt = wait_fixed = wait_random = MagicMock()\n"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--lengths", default="4096,16384,65536")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--answers", type=int, default=500)
    parser.add_argument("--tasks", default=",".join(SUITE.tasks))
    parser.add_argument("--tokenizer", default=str(files("unspool") / "assets" / "tiny-base"))
    parser.add_argument("--words", type=Path, help="folder with the lists of wonderwords, if it is not installed")
    parser.add_argument("--data", action="append", default=[], help="NAME=FILE of JSON data that the clone lacks")
    arguments = parser.parse_args()
    tasks, lengths = arguments.tasks.split(","), [int(length) for length in arguments.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "clone"
        shutil.copytree(arguments.clone / "scripts", copy / "scripts")
        given = dict(text.split("=", 1) for text in arguments.data)
        words, stand_ins = prepare(copy, Path(folder), arguments.words, {name: Path(p) for name, p in given.items()})
        print(f"RULER {arguments.clone}, tokenizer {Path(arguments.tokenizer).name}, seed {SEED}")
        print(f"stand-ins: {'; '.join(stand_ins) or 'none'}\n", flush=True)
        compare(copy, Path(folder) / "prompts", words, tasks, lengths, arguments)


def prepare(copy: Path, folder: Path, words: Path | None, given: dict[str, Path]) -> tuple[Path | None, list[str]]:
    """Complete a clone and its imports; return the folder of word lists and the list of replacements."""
    stand_ins = []
    own = Sources(AutoTokenizer.from_pretrained(str(files("unspool") / "assets" / "tiny-base")), {}, None)  # type: ignore[arg-type]
    made = {
        "PaulGrahamEssays.json": lambda: {
            "text": "\n\n".join(own.essay.words[at] for at in range(len(own.essay.words)))
        },
        "english_words.json": lambda: dict(enumerate(f"{a}{b}" for a in own.words[::20] for b in own.words[::9])),
        "squad.json": lambda: released_squad(generate_squad()),
        "hotpotqa.json": lambda: released_hotpotqa(generate_hotpotqa()),
    }
    for name, make in made.items():
        path = copy / "scripts" / JSON / name
        is_there = path.is_file() and not path.read_bytes().startswith(b"version https://git-lfs")
        if name in given:
            shutil.copyfile(given[name], path)
        elif not is_there:
            path.write_text(json.dumps(make()))
            stand_ins.append(f"{name} (generated)")
    stubs = folder / "stubs"
    stubs.mkdir()
    for name, text in STUBS.items():
        if find_spec(name) is None:
            (stubs / f"{name}.py").write_text(text)
            stand_ins.append(f"package {name}" + (" (our sentence splitter)" if name == "nltk" else ""))
    sys.path.insert(0, str(stubs))
    if find_spec("wonderwords").origin == str(stubs / "wonderwords.py"):  # type: ignore[union-attr]
        if words is None:
            words = folder / "words"
            words.mkdir()
            for at, name in enumerate(WORD_LISTS):
                (words / name).write_text("\n".join(own.words[at::6]) + "\n")
            stand_ins.append("word lists (ours)")
        os.environ["RULER_WORDS"] = str(words)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return words, stand_ins


def released_squad(questions: QuestionSet) -> dict[str, Any]:
    """Write questions in SQuAD's released form; one paragraph of each article occurs twice."""
    articles: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for query in questions.queries:
        number = query.golds[0]
        paragraphs = articles.setdefault(tuple(sorted({number, *query.more})), [])
        asked = {"question": query.question, "is_impossible": False, "answers": [{"text": a} for a in query.answers]}
        text = questions.documents[number]
        if not paragraphs or paragraphs[-1]["context"] != text:
            paragraphs.append({"context": text, "qas": []})
        paragraphs[-1]["qas"].append(asked)
        paragraphs[-1]["qas"].append({"question": "?", "is_impossible": True, "answers": []})
    found = [
        {"title": f"t{at}", "paragraphs": [*each, {**each[0], "qas": []}]} for at, each in enumerate(articles.values())
    ]
    return {"data": found}


def released_hotpotqa(questions: QuestionSet) -> list[dict[str, Any]]:
    def split(number: int) -> list[Any]:
        title, text = questions.documents[number].split("\n", 1)
        return [title, re.split(r"(?<=\.)(?= )", text)]

    return [
        {
            "question": query.question,
            "answer": query.answers[0],
            "context": [split(number) for number in query.context],
            "supporting_facts": [[split(number)[0], 0] for number in query.golds],
        }
        for query in questions.queries
    ]


def compare(
    copy: Path, out: Path, words: Path | None, tasks: list[str], lengths: list[int], arguments: argparse.Namespace
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    entry = {"suite": "ruler", "lengths": lengths, "tasks": tasks}
    paths = {} if words is None else {"wonderwords": str(words)}
    reference = SUITE.chosen_reference(SUITE.config(**entry, reference=str(copy), paths=paths), Path())
    assert reference is not None
    print(f"files that differ from {reference.repo} {reference.version}: {', '.join(reference.differs) or 'none'}\n")
    metric = rulers_metric(copy)
    print(
        "| task | length | size | prompts equal | from files | scores equal | tokens: D, p | places: D, p (n) | "
        "counts: D, p |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        flush=True,
    )
    p_values, unequal = [], 0
    for task in tasks:
        for length in lengths:
            rows = run_ruler(copy, out, task, length, arguments)
            sources = SUITE.load(tokenizer, reference.paths, reference.wording)
            asks = [Ask(length=length, seed=SEED, index=at, mode="reference") for at in range(len(rows))]
            built = [SUITE.tasks[task].build(sources, ask) for ask in asks]
            size = max(asked.meta["size"] for asked in built)
            equal = sum(same(asked, row) for asked, row in zip(built, rows, strict=True))
            config = SUITE.config(**{**entry, "tasks": [task], "lengths": [length]}, reference=str(out))
            read = SUITE.chosen_reference(config, Path())
            assert read is not None and not read.differs, "RULER's files have RULER's words"
            from_files = sum(same(read.prompts[task, length][at], row) for at, row in enumerate(rows))
            scores = sum(
                round(100 * SUITE.tasks[task].score(answer, built[at]), 2) == metric[task](answer, rows[at]["outputs"])  # type: ignore[operator]
                for at, answer in mutated_answers(rows, arguments.answers, f"{task} {length}")
            )
            own = own_draws(sources, task, length, len(rows))
            tests = [
                ks(
                    measures(task, sources, [text_of(row) for row in rows], [row["outputs"] for row in rows])[name],
                    measures(task, sources, [text_of(a) for a in own], [a.references for a in own])[name],
                )
                for name in ("tokens", "places", "counts")
            ]
            p_values += [p for _, p, _ in tests]
            unequal += len(rows) - equal + len(rows) - from_files + arguments.answers - scores
            (d1, p1, _), (d2, p2, n2), (d3, p3, _) = tests
            print(
                f"| `{task}` | {length} | {size} | {equal}/{len(rows)} | {from_files}/{len(rows)} | "
                f"{scores}/{arguments.answers} | {d1:.2f}, {p1:.2f} | {d2:.2f}, {p2:.2f} ({n2}) | {d3:.2f}, {p3:.2f} |",
                flush=True,
            )
    low = sum(p < 0.05 for p in p_values)
    print(f"\nunequal prompts or scores: {unequal}")
    print(
        f"KS: {low} of {len(p_values)} tests have p < 0.05 ({0.05 * len(p_values):.1f} expected by chance); "
        f"smallest p {min(p_values):.4f}, Bonferroni bound {0.05 / len(p_values):.5f}"
    )
    sys.exit(bool(unequal) or min(p_values) < 0.05 / len(p_values))


def run_ruler(copy: Path, out: Path, task: str, length: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run RULER's unchanged prepare.py and read its output files."""
    options = {
        "save_dir": out / str(length) / "data",
        "benchmark": "synthetic",
        "task": task,
        "tokenizer_path": arguments.tokenizer,
        "tokenizer_type": "hf",
        "max_seq_length": length,
        "num_samples": arguments.samples,
        "model_template_type": "base",
        "random_seed": SEED,
    }
    command = [sys.executable, str(copy / "scripts/data/prepare.py")]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=copy / "scripts", timeout=3600)
    path = out / str(length) / "data" / task / "validation.jsonl"
    if not path.is_file():
        raise SystemExit(f"RULER wrote no prompts of {task}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def text_of(one: Any) -> str:
    if isinstance(one, Question):
        return one.context + one.question + one.prefix
    return str(one["input"] + one["answer_prefix"])


def same(asked: Question, row: dict[str, Any]) -> bool:
    return text_of(asked) == text_of(row) and list(asked.references) == row["outputs"]


def own_draws(sources: Sources, task: str, length: int, count: int) -> list[Question]:
    """Make prompts with RULER's haystack size and permutation, and random draws of our own."""
    (run,) = (one for key, one in sources._cache.items() if key[0] == task and isinstance(one, published.Run))
    name = f"{OWN_SEED} {task} {length}"
    run._draws.random.seed(name)
    run._draws.numpy.seed(crc32(name.encode()))
    run._states[:] = [run._draws.state]
    asks = [Ask(length=length, seed=SEED, index=at, mode="reference") for at in range(count)]
    return [SUITE.tasks[task].build(sources, ask) for ask in asks]


def measures(task: str, sources: Sources, texts: list[str], references: list[Any]) -> dict[str, list[float]]:
    def count(text: str) -> int:
        if task.startswith("qa"):
            return len(re.findall(r"^Document \d+:$", text, flags=re.MULTILINE))
        return (
            text.count("\n")
            if task in ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt")
            else len(text.split())
        )

    return {
        "tokens": [float(sources.count(text)) for text in texts],
        # Position of each reference's first occurrence, as a share of the text.
        "places": [
            text.find(one) / len(text)
            for text, each in zip(texts, references, strict=True)
            for one in each
            if one in text
        ],
        "counts": [float(count(text)) for text in texts],
    }


def ks(first: list[float], second: list[float]) -> tuple[float, float, int]:
    with warnings.catch_warnings(action="ignore"):  # many ties: scipy falls back to the asymptotic p
        found = ks_2samp(first, second)
    return float(found.statistic), float(found.pvalue), len(first)


def rulers_metric(copy: Path) -> dict[str, Any]:
    """Return RULER's post-processing and metric for each task; imports that only read and write files are replaced."""
    metrics = runpy.run_path(str(copy / "scripts/eval/synthetic/constants.py"))["TASKS"]
    with stubbed(
        "nltk",
        "pandas",
        "nemo",
        "nemo.collections",
        "nemo.collections.asr",
        "nemo.collections.asr.parts",
        "nemo.collections.asr.parts.utils",
        "nemo.collections.asr.parts.utils.manifest_utils",
    ):
        argv, sys.argv = sys.argv, ["evaluate.py", "--data_dir", "none"]
        try:
            clean = runpy.run_path(str(copy / "scripts/eval/evaluate.py"), run_name="evaluate")["postprocess_pred"]
        finally:
            sys.argv = argv
    import yaml

    base = yaml.safe_load((copy / "scripts/synthetic.yaml").read_text())
    return {
        task: lambda answer, outputs, score=metrics[base[task]["task"]]["metric_fn"]: score(
            [clean(answer, {})], [outputs]
        )
        for task in SUITE.tasks
    }


@contextlib.contextmanager
def stubbed(*names: str) -> Iterator[None]:
    from unittest.mock import MagicMock

    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = lambda attribute: MagicMock()  # type: ignore[method-assign]
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def mutated_answers(rows: list[dict[str, Any]], count: int, seed: str) -> Iterator[tuple[int, str]]:
    """Return correct answers, and answers cut, lengthened, recased, reordered, mixed with others or damaged."""
    rng = random.Random(seed)
    noise = [" ", "\n", "\t", "\x00", "\x1f", ", ", ". ", " and ", "İ", "ß", "–", "no", "1", "\u2028"]
    for number in range(count):
        at = number % len(rows)
        parts = list(rows[at]["outputs"])
        rng.shuffle(parts)
        parts = parts[: rng.randint(0, len(parts))] if rng.random() < 0.4 else parts
        if rng.random() < 0.3:
            parts += rng.choice(rows)["outputs"]
        answer = rng.choice(noise).join(parts)
        for _ in range(rng.randint(0, 3)):
            place = rng.randint(0, len(answer))
            kind = rng.random()
            if kind < 0.35:
                answer = answer[:place] + rng.choice(noise) + answer[place:]
            elif kind < 0.6:
                answer = answer[:place] + answer[place + 1 :]
            elif kind < 0.75:
                answer = rng.choice([answer.upper(), answer.lower(), answer.swapcase(), answer.title()])
            else:
                answer = rng.choice(noise) * rng.randint(1, 3) + answer + rng.choice(noise)
        yield at, answer


if __name__ == "__main__":
    main()
