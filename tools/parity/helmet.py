"""Compare `suite: helmet, reference: CLONE` with HELMET's own code: prompts by bytes, scores by value.

    python tools/parity/helmet.py CLONE [--length 4K] [--answers 500] [--tasks nq,json_kv] [--tokenizer FOLDER]

CLONE is a clone of princeton-nlp/HELMET. Its loaders, `tokenize` and metrics run on stand-in data in the public layout
(standins.py); both sides read the same files. Needs datasets, rouge_score, pytrec_eval and nltk. Replaced: the Hub
(stand-ins), Llama 2's tokenizer (splits at spaces), the sentence splitter (ours), the entailment model of citations (a
random function), worker processes, and seeds that HELMET does not set (ours).
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from mutations import mutated
from standins import LABELS, hub_sets, write_helmet, write_lines
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from unspool.core.sizes import parse_size
from unspool.evals.backends.base import TOKEN_IDS
from unspool.evals.heldout import PlanInputs
from unspool.evals.scoring.citations import citations, claims_of, sentences
from unspool.evals.suite import Question
from unspool.evals.suites.helmet import alce, books, icl, json_kv, rag, rerank
from unspool.evals.suites.helmet.clone_books import LLAMA2
from unspool.evals.suites.helmet.clone_prompts import seed_of, shuffled
from unspool.evals.suites.helmet.data import BOOKS, CITE, RAG
from unspool.evals.suites.helmet.helmet_clone import _DEMO_FILES, Clone
from unspool.evals.suites.helmet.suite import NEEDLE_ANSWER_TOKENS, SUITE, HelmetEval
from unspool.evals.task_suite import PlannedTasks
from unspool.models.location import ASSETS
from unspool.models.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NAMES = {"infbench_qa": "infbench_qa_eng", "infbench_mc": "infbench_choice_eng", "infbench_sum": "infbench_sum_eng"}
METRICS = {
    **dict.fromkeys((*RAG, "json_kv"), "substring_exact_match"),
    **dict.fromkeys(NEEDLE_ANSWER_TOKENS, "ruler_recall"),
    "msmarco": "NDCG@10",
    "infbench_qa": "rougeL_f1",
    "infbench_mc": "exact_match",
    **dict.fromkeys(LABELS, "exact_match"),
}
HUB_FILES = {
    "trec_coarse": ("CogComp/trec", "test", "train"),
    "trec_fine": ("CogComp/trec", "test", "train"),
    "banking77": ("PolyAI/banking77", "test", "train"),
    "clinc150": ("clinc_oos", "validation", "train"),
    "nlu": ("xingkunliuxtracta/nlu_evaluation_data", "train", None),
    "narrativeqa": ("narrativeqa", "test", "train"),
    "infbench_qa": ("xinrongzhang2022/infinitebench", "longbook_qa_eng", None),
    "infbench_mc": ("xinrongzhang2022/infinitebench", "longbook_choice_eng", None),
    "infbench_sum": ("xinrongzhang2022/infinitebench", "longbook_sum_eng", None),
    "multi_lexsum": ("allenai/multi_lexsum", "validation", "train"),
}


def entails(premise: str, claim: str) -> bool:
    return hashlib.sha256(f"{premise}|{claim}".encode()).digest()[0] < 110


class Recorder:
    """Tokenizer that records its last prompt."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.text = tokenizer, ""

    def __call__(self, texts: Any, **options: Any) -> Any:
        if "return_tensors" in options:
            self.text = texts[0]
        return self.tokenizer(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def space_tokenizer(folder: Path) -> None:
    """Replacement for Llama 2's tokenizer: every word and mark is a token."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def import_clone(clone: Path, folder: Path, hub: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Import HELMET's data.py, model_utils.py and eval_alce.py with their unavailable imports replaced."""
    import datasets
    import nltk

    datasets.disable_progress_bars()
    nltk.sent_tokenize = sentences
    for missing in ("mauve",):
        sys.modules.setdefault(missing, MagicMock())
    sys.path.insert(0, str(clone))
    data, model_utils, eval_alce = (importlib.import_module(name) for name in ("data", "model_utils", "eval_alce"))
    own_load = datasets.load_dataset

    def load_dataset(path: str, name: Any = None, **options: Any) -> Any:
        if path == "json":
            return own_load(path, cache_dir=str(folder / "cache"), **options)
        splits = {split: datasets.Dataset.from_list(rows) for split, rows in hub[path].items()}
        for split, rows in splits.items():
            for field in ("coarse_label", "fine_label", "label", "intent"):
                if field in rows.column_names:
                    most = 1 + max(max(other[field]) for other in splits.values())
                    splits[split] = rows = rows.cast_column(field, datasets.ClassLabel(num_classes=most))
        return datasets.DatasetDict(splits)

    def alone(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *given: Any, **options: Any) -> Any:
            return method(self, *given, **{key: value for key, value in options.items() if key != "num_proc"})

        return run

    own_shuffle = datasets.Dataset.shuffle

    def shuffle(self: Any, seed: Any = None, **options: Any) -> Any:
        if seed is None:  # the row for which examples are drawn is in the caller's frame
            caller = sys._getframe(1).f_locals
            row = caller.get("example") or caller.get("x")
            seed = seed_of(row["question"]["text"] if "question" in row else row["id"])
        return own_shuffle(self, seed=seed, **options)

    datasets.Dataset.map, datasets.Dataset.filter = alone(datasets.Dataset.map), alone(datasets.Dataset.filter)
    datasets.Dataset.shuffle = shuffle
    datasets.load_dataset = data.load_dataset = load_dataset
    llama2 = AutoTokenizer.from_pretrained(folder / "llama2")
    data.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: llama2)
    for module in (data, eval_alce):
        module.logger.setLevel(logging.ERROR)
    eval_alce.tqdm, eval_alce.sent_tokenize, eval_alce.autoais_model = list, sentences, "replaced"
    eval_alce._run_nli_autoais = lambda premise, claim: int(entails(premise, claim))
    return data, model_utils, eval_alce


def dataset_name(task: str, length: int) -> str:
    if task in NEEDLE_ANSWER_TOKENS:
        return f"ruler_{task.replace('multikey', 'mk').replace('multivalue', 'mv')}"
    if task in RAG:
        return f"kilt_{task}" + ("_3" if task == "popqa" else "")
    if task in CITE:
        return f"alce_{task}_{alce.COUNTS[length]}"
    if task in BOOKS:
        return f"{NAMES.get(task, task)}_{length - books.SET_ASIDE.get(task, 200) - books.ANSWER_TOKENS[task]}"
    if task in LABELS:
        shots = icl.COUNTS[task][icl.LENGTHS.index(length)]
        return f"icl_{task.replace('clinc150', 'clinic150')}_{shots}shot_balance"
    return {"json_kv": "json_kv", "msmarco": "msmarco_rerank_psg"}[task]


class Beside:
    """Both implementations at one length."""

    def __init__(self, clone: Path, folder: Path, length: int, tokenizer: str) -> None:
        self.length, self.root = length, folder / "clone"
        self.root.mkdir()
        for name in ("data.py", "prompts"):
            (self.root / name).symlink_to(clone / name)
        counts = {"rag": rag.COUNTS, "msmarco": rerank.COUNTS, "cite": alce.COUNTS, "json_kv": json_kv.COUNTS}
        write_helmet(self.root, length, {kind: table[length] for kind, table in counts.items()})
        space_tokenizer(folder / "llama2")
        hub = hub_sets()
        self.paths = {LLAMA2: str(folder / "llama2")}
        for task, (name, tests, train) in HUB_FILES.items():
            for split, key in ((tests, task), (train, f"{task}_demos")):
                if split is not None:
                    rows = [row for row in hub[name][split] if row.get("summary/short", "") is not None]
                    write_lines(folder / f"{key}.jsonl", rows)
                    self.paths[key] = str(folder / f"{key}.jsonl")
        self.data, self.model_utils, self.eval_alce = import_clone(clone, folder, hub)
        self.tokenizer = load_tokenizer(tokenizer)
        self.tokenizer.chat_template = TEMPLATE

    def theirs(self, task: str, *, chat: bool) -> Iterator[tuple[str, list[int], dict[str, Any], dict[str, Any]]]:
        """Return HELMET's prompts: text, token ids, row and its loader's result."""
        limit = 500 if task in LABELS else 100
        shots = 0 if task in LABELS else 2
        args = SimpleNamespace(max_test_samples=limit, shots=shots, seed=42)
        clone = Clone(self.root, {})
        path = "" if task in HUB_FILES else str(clone.file(task, self.length))
        demos = str(self.root / _DEMO_FILES[task]) if task in _DEMO_FILES else ""
        random.seed(args.seed)  # as its run_test does
        data = self.data.load_data(args, dataset_name(task, self.length), path, demos)
        for row in data["data"]:
            recorder = Recorder(self.tokenizer)
            ids = self.model_utils.tokenize(
                dict(row), data, recorder, self.length, SUITE.tasks[task].answer_tokens, chat, system_message=None
            )
            yield recorder.text, ids.input_ids[0].tolist(), row, data

    def ours(self, task: str, *, chat: bool) -> Iterator[tuple[str, list[int], Question]]:
        paths = {key: path for key, path in self.paths.items() if key in (task, f"{task}_demos", LLAMA2)}
        entry = {"suite": "helmet", "tasks": [task], "lengths": [self.length], "samples": 1000, "paths": paths}
        planned = self.plan({**entry, "chat": "on" if chat else "off"})
        for question in planned.question_ids:
            asked, ids = planned._encode(question)
            words = asked.context + asked.question
            text = planned.encoder._templated(words) if chat else words + asked.prefix
            yield text, [int(one) for one in ids], asked

    def compare(self, task: str, answers: int, *, chat: bool) -> dict[str, Any]:
        theirs = list(self.theirs(task, chat=chat))
        own = list(self.ours(task, chat=chat))
        ours = {text: (ids, asked) for text, ids, asked in own}
        differing = Counter(text for text, *_ in theirs) - Counter(text for text, *_ in own)
        shared = [(ids, row, data, *ours[text]) for text, ids, row, data in theirs if text in ours]
        room = self.length - SUITE.tasks[task].answer_tokens
        found = {
            "prompts": len(theirs),
            "ours": len(own),
            "text differs": differing.total() + abs(len(theirs) - len(own)),
            "ids differ": sum(ids != own for ids, _, _, own, _ in shared),
            "cut": sum(len(ids) >= room - 3 for _, ids, *_ in theirs),
            "longest": max(len(ids) for _, ids, *_ in theirs),
        }
        if differing:
            _show(next(iter(differing)), list(ours))
        if not shared or SUITE.tasks[task].judge is not None:
            return found
        rng, differ, points = random.Random(f"{task} {chat}"), 0, 0.0
        for number in range(answers):
            _, row, data, _, asked = shared[number % len(shared)]
            output = mutated(rng, asked)
            score = SUITE.tasks[task].score(output, asked)
            said = output if chat else data["system_template"].format(**row) + output
            public = self.public_scores(task, said, row, data)
            numbers = {"score": score} | (self.own_citations(task, said, asked) if task in CITE else {})
            points += public["score"]
            wrong = {
                name: (one, public[name]) for name, one in numbers.items() if abs(one - public[name]) > _close(task)
            }
            differ += bool(wrong)
            if wrong and differ <= 2:
                print(f"  {task}: {wrong} (ours, theirs) for {output!r}, {asked.references[:2]}")
        return found | {"answers": answers, "scores differ": differ, "mean score": round(points / answers, 3)}

    def public_scores(self, task: str, said: str, row: dict[str, Any], data: dict[str, Any]) -> dict[str, float]:
        if task not in CITE:
            found, _ = data["post_process"]({"output": said}, row)
            return {"score": float(found[METRICS[task]])}
        path = self.root / f"{task}.json"
        path.write_text(json.dumps({"data": [{**row, "output": said}]}))
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # mean of an empty list
            self.eval_alce.main(["--f", str(path), "--citations", "--no_rouge"])
        found = json.loads(Path(f"{path}.score").read_text())
        score = "str_em" if task == "asqa" else "qampari_rec_top5"
        names = {"score": score, "recall": "citation_rec", "precision": "citation_prec"}
        return {name: found[public] / 100 for name, public in names.items()}

    def own_citations(self, task: str, said: str, asked: Question) -> dict[str, float]:
        claims = claims_of(said, question=asked.meta["question"] if task == "qampari" else None)
        found = citations(claims, asked.meta["documents"], entails, "reference")
        return dict(zip(("recall", "precision"), (0.0, 0.0) if found is None else astuple(found), strict=True))

    def drawn_demos(self, draws: int) -> float:
        """Return p of a chi-square test of our examples against HELMET's unseeded ones (NarrativeQA)."""
        from scipy.stats import chi2_contingency

        rows, rng = 40, np.random.default_rng()
        theirs = np.bincount([at for _ in range(draws) for at in rng.permutation(rows)[:2]], minlength=rows)
        ours = [at for number in range(draws) for at in shuffled(rows, seed_of(f"question {number}"))[:2]]
        return float(chi2_contingency([theirs, np.bincount(ours, minlength=rows)]).pvalue)

    def own_draws(self, count: int) -> str:
        """Return our draws for JSON-KV without its file: number of keys, and p of a test for uniform positions."""
        from scipy.stats import kstest

        Clone(self.root, {}).file("json_kv", self.length).unlink()
        config = {"suite": "helmet", "tasks": ["json_kv"], "lengths": [self.length], "samples": count}
        planned = self.plan(config)
        asked = [planned.question(question) for question in planned.question_ids]
        keys = sorted({one.meta["keys"] for one in asked})
        wanted = json_kv.COUNTS[self.length]
        p = kstest([one.depth for one in asked], "uniform").pvalue
        return f"JSON-KV without its file: {keys} keys ({wanted} in its file), uniform positions: KS p = {p:.2f}"

    def plan(self, entry: dict[str, Any]) -> PlannedTasks:
        config = HelmetEval.model_validate({**entry, "reference": str(self.root)})
        return PlannedTasks(SUITE, config, PlanInputs(tokenizer=self.tokenizer, form=TOKEN_IDS, seed=0, root=Path()))


def _close(task: str) -> float:
    return 5e-6 if task == "msmarco" else 1e-9  # HELMET rounds nDCG to five digits


def _shared(one: str, other: str) -> int:
    return next((at for at, (mine, yours) in enumerate(zip(one, other, strict=False)) if mine != yours), len(one))


def _show(text: str, ours: list[str]) -> None:
    nearest = max(ours, key=lambda other: _shared(text, other))
    at = _shared(text, nearest)
    print(f"  at {at} of {len(text)}:\n   theirs {text[at - 60 : at + 90]!r}\n   ours   {nearest[at - 60 : at + 90]!r}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("clone", type=Path)
    parser.add_argument("--length", default="4K")
    parser.add_argument("--answers", type=int, default=500)
    parser.add_argument("--tokenizer", default=str(ASSETS / "tiny-base"))
    parser.add_argument("--tasks", default=",".join(SUITE.tasks))
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        beside = Beside(options.clone.resolve(), Path(folder), parse_size(options.length), options.tokenizer)
        for task in options.tasks.split(","):
            for chat in (False, True) if SUITE.tasks[task].chat else (False,):
                found = beside.compare(task, options.answers, chat=chat)
                failed |= any(found.get(name) for name in ("text differs", "ids differ", "scores differ"))
                print(f"{task}{' chat' if chat else ''}: {found}", flush=True)
        print(beside.own_draws(300))
        print(f"examples of NarrativeQA and Multi-LexSum: chi-square p = {beside.drawn_demos(4000):.2f}")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
