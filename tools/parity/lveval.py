"""Compare `reference: CLONE` with LV-Eval's or ∞Bench's own code: prompts by bytes, scores by value.

    python tools/parity/lveval.py CLONE [--length 16K] [--answers 500] [--tokenizer FOLDER]
    python tools/parity/lveval.py CLONE --infbench

CLONE is a clone of infinigence/LVEval, or with --infbench of OpenBMB/InfiniteBench. Its `truncate_prompt` and metrics
run on stand-in files in the public format; both sides read the same files. Needs jieba and rouge. Replaced: datasets,
evaluate and vllm, which these parts do not use.
"""

import argparse
import importlib
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from mutations import mutated
from standins import say, write_lines

from unspool.core.sizes import parse_size
from unspool.evals.heldout import PlanInputs
from unspool.evals.suite import Question
from unspool.evals.suites import infbench, lveval
from unspool.evals.task_suite import PlannedTasks, TaskSuite
from unspool.models.location import ASSETS
from unspool.models.tokenizer import load_tokenizer

ROWS = 20
CHINESE = "研究表明，这家公司的创始人于一九八四年在上海出生；他和家人都住在河边，主要从事水稻种植以及丝绸贸易。"
Theirs = Callable[[dict[str, Any]], str]


def chinese(rng: random.Random, count: int) -> str:
    return "".join(rng.choice(CHINESE) for _ in range(count))


def rows(task: str, words: int) -> list[dict[str, Any]]:
    """Return rows in LV-Eval's format: some without keywords, some with answers of blacklisted words only."""
    found = []
    for number in range(ROWS):
        rng = random.Random(f"{task} {number}")
        is_english = lveval.language_of(task) == "en"
        write = say if is_english else chinese
        answers = [write(rng, rng.randint(2, 9)), write(rng, 3)]
        if number % 7 == 6:
            answers[0] = "and of the" if is_english else "的和是"
        # Never only marks, because its code would divide by zero.
        keywords = None if number % 5 == 4 else answers[0][: rng.randint(2, 20)] + (" kelan" if is_english else "上海")
        context = write(rng, words + 300 * number)
        row = {"input": f"{write(rng, 6)}?", "answers": answers, "context": context, "length": words}
        found.append(row | ({"answer_keywords": keywords} if number % 5 != 3 else {}))
    return found


def import_clone(clone: Path, *names: str) -> list[Any]:
    for missing in ("datasets", "evaluate", "vllm"):
        sys.modules[missing] = MagicMock()
    sys.path.insert(0, str(clone))
    return [importlib.import_module(name) for name in names]


def ours(suite: TaskSuite, task: str, length: int, tokenizer: Any, **settings: Any) -> list[tuple[str, Question]]:
    entry = {"suite": suite.name, "tasks": [task], "lengths": [length], "samples": 1000, **settings}
    inputs = PlanInputs(tokenizer=tokenizer, seed=0, root=Path())
    planned = PlannedTasks(suite, suite.config.model_validate(entry), inputs)
    found = [planned._encode(question)[0] for question in planned.question_ids]
    return [(asked.context + asked.question + asked.prefix, asked) for asked in found]


def report(task: str, pairs: list[tuple[str, str, Any, Question]], score: Any, answers: int) -> bool:
    """Print how many prompts and scores differ; `pairs` hold our prompt, theirs, the row and the question."""
    differ, points, rng = 0, 0.0, random.Random(task)
    for number in range(answers):
        _, _, row, asked = pairs[number % len(pairs)]
        output = mutated(rng, asked)
        own, public = score(output, row, asked)
        points += public
        differ += abs(own - public) > 1e-9
        if abs(own - public) > 1e-9 and differ <= 2:
            print(
                f"  {task}: ours {own}, theirs {public} for {output!r}, {row['answers']}, {row.get('answer_keywords')}"
            )
    texts = sum(one != other for one, other, *_ in pairs)
    print(
        f"{task}: prompts {len(pairs)}, differ {texts}; answers {answers}, differ {differ}, mean {points / answers:.3f}"
    )
    return bool(texts or differ)


def compare_lveval(clone: Path, length: int, answers: int, tokenizer: Any) -> bool:
    config, utils = import_clone(clone, "config", "utils")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for task in lveval.PROMPTS:
            written = rows(task, length // 3)
            write_lines(Path(folder) / f"{task}_{length // 1024}k.jsonl", written)
            found = ours(lveval.SUITE, task, length, tokenizer, reference=str(clone), paths={"data": folder})
            pairs = []
            for (text, asked), row in zip(found, written, strict=True):
                prompt = config.DATASET_PROMPT[task].format(**row)
                pairs.append((text, utils.truncate_prompt(tokenizer, prompt, length - 500), row, asked))
            cut = sum(len(pair[1]) < len(config.DATASET_PROMPT[task].format(**pair[2])) for pair in pairs)

            def score(output: str, row: Any, asked: Question, task: str = task) -> tuple[float, float]:
                keywords = row.get("answer_keywords")
                public = config.DATASET_METRIC[task](output, row["answers"][0], keywords)
                return lveval.SUITE.tasks[task].score(output, asked) or 0.0, float(public)

            failed |= report(f"{task} ({cut} cut)", pairs, score, answers)
    return failed


def compare_infbench(clone: Path, length: int, answers: int, tokenizer: Any) -> bool:
    eval_utils, scores = import_clone(clone / "src", "eval_utils", "compute_scores")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "clone"
        copy.mkdir()
        (copy / "src").symlink_to(clone / "src")
        for task in infbench.TASKS:
            written = []
            for number in range(ROWS):
                rng = random.Random(f"{task} {number}")
                answer = str(rng.randint(10**4, 10**5)) if task != "kv_retrieval" else f"{rng.getrandbits(64):x}-4e2a"
                text = say(rng, length // 3 + 100 * number)
                written.append({"id": number, "context": text, "input": f"{say(rng, 4)}?", "answer": answer})
            write_lines(copy / f"data/{task}.jsonl", written)
            found = ours(infbench.SUITE, task, length, tokenizer, reference=str(copy))
            most = length - infbench.ANSWER_TOKENS[task]
            pairs = []
            for (text, asked), row in zip(found, written, strict=True):
                prompt = eval_utils.create_prompt(row, task, "yarn-mistral", "")
                tokens = eval_utils.truncate_input(tokenizer.encode(prompt), most - most % 2)
                theirs = prompt if len(tokenizer.encode(prompt)) <= most else _decode(tokenizer, tokens)
                pairs.append((text, theirs, row | {"answers": [row["answer"]]}, asked))

            def score(output: str, row: Any, asked: Question, task: str = task) -> tuple[float, float]:
                public = scores.get_score_one(output, row["answer"], task, "yarn-mistral")
                return infbench.SUITE.tasks[task].score(output, asked) or 0.0, public

            failed |= report(task, pairs, score, answers)
    return failed


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("clone", type=Path)
    parser.add_argument("--length", default="16K")
    parser.add_argument("--answers", type=int, default=500)
    parser.add_argument("--infbench", action="store_true")
    parser.add_argument("--tokenizer", default=str(ASSETS / "tiny-base"))
    options = parser.parse_args()
    compare = compare_infbench if options.infbench else compare_lveval
    tokenizer = load_tokenizer(options.tokenizer)
    sys.exit(int(compare(options.clone.resolve(), parse_size(options.length), options.answers, tokenizer)))


if __name__ == "__main__":
    main()
