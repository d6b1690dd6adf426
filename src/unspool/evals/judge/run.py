"""Judge the answers of a scored model and write the scores back into its folder.

Every reply is saved on arrival, keyed by the hash of judge and prompt. A killed run resumes, and no prompt is sent
twice, except prompts with unparsable replies on request. Unparsable replies are counted, and their scores stay missing.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from unspool.core.artifacts import MANIFEST, find_damage, publish, read_manifest, write_atomic
from unspool.core.errors import ConfigError, DataError
from unspool.core.formatting import MISSING
from unspool.core.progress import progress_bar
from unspool.core.result import Result
from unspool.core.sizes import format_count
from unspool.evals.backends.base import Backend
from unspool.evals.config import eval_adapter
from unspool.evals.judge.protocols import REPLY_TOKENS, Call, Reply, calls, score
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.evals.prompts import Prompt, PromptQuestion
from unspool.evals.reply_cache import ReplyCache
from unspool.evals.run import SAMPLES, SUMMARY, summarize
from unspool.evals.suite import Question
from unspool.evals.suites.records import Record, read_records

logger = logging.getLogger(__name__)

JUDGEMENTS = "judgements.jsonl"
CHARS_PER_TOKEN = 4  # estimate for English
Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Judge:
    name: str
    ask: Callable[[str], str]
    width: int = 1  # concurrent requests


@dataclass(frozen=True, kw_only=True)
class Estimate:
    calls: int
    prompt_tokens: int
    reply_tokens: int  # upper bound

    def cost(self, price_in: float, price_out: float) -> float:
        """Return the cost, given prices per million tokens."""
        return (self.prompt_tokens * price_in + self.reply_tokens * price_out) / 1e6

    def __str__(self) -> str:
        tokens = f"about {format_count(self.prompt_tokens)} prompt and at most {format_count(self.reply_tokens)} reply"
        return f"{self.calls} requests to the judge, {tokens} tokens"


class JudgeReplies(ReplyCache):
    """Replies of one judge by prompt."""

    def __init__(self, path: Path, judge: str) -> None:
        super().__init__(path)
        self._judge = judge

    def get(self, prompt: str) -> str | None:
        reply: str | None = self.read_reply(self._key(prompt))
        return reply

    def add(self, prompt: str, reply: str) -> None:
        self.write_reply(self._key(prompt), reply, replace=True, judge=self._judge)

    def left(self, calls: Iterable[Call], *, again: bool = False) -> list[str]:
        """Prompts without a reply. With `again`, also prompts with an unparsable reply."""

        def is_left(call: Call) -> bool:
            reply = self.get(call.prompt)
            return reply is None or (again and call.parse(reply) is None)

        return list({call.prompt: None for call in calls if is_left(call)})

    def _key(self, prompt: str) -> str:
        return hashlib.sha256(f"{self._judge}\0{prompt}".encode()).hexdigest()


def scores_folders(path: Path) -> list[Path]:
    """Return the folder itself if it has scores, else the scores folders of the run."""
    found = [folder for folder in [path, *sorted(path.glob("scores/*"))] if (folder / SAMPLES).is_file()]
    found = [folder for folder in found if (read_manifest(folder) or {}).get("kind") == "scores"]
    if not found:
        raise ConfigError(f"{path}: no scores found; pass a run, or the output folder of an evaluation.")
    return found


def estimate(samples: Sequence[Sample], replies: JudgeReplies, *, again: bool = False) -> Estimate:
    """Estimate the requests without a cached reply. With `again`, include unparsable replies."""
    left = replies.left(_calls(samples), again=again)
    tokens = sum(len(prompt) for prompt in left) // CHARS_PER_TOKEN
    return Estimate(calls=len(left), prompt_tokens=tokens, reply_tokens=len(left) * reply_tokens(again))


def replies_for(folder: Path, judge: str) -> JudgeReplies:
    """Open the cache next to the folder. Judging replaces the folder as a whole."""
    beside = folder.with_name(f"{folder.name}.{JUDGEMENTS}")
    if not beside.exists() and (folder / JUDGEMENTS).exists():
        shutil.copyfile(folder / JUDGEMENTS, beside)
    return JudgeReplies(beside, judge)


def judge_folder(folder: Path, judge: Judge, *, again: bool = False) -> dict[str, Any]:
    """Judge all answers of a folder, write the scores, and return the new summary.

    With `again`, prompts with an unparsable reply are sent once more.
    """
    samples = read_samples(folder)
    with replies_for(folder, judge.name) as replies:
        ask_all(_calls(samples), judge, replies, label=f"judge {folder.name}", again=again)
        judged = [_apply_judgment(sample, judge.name, replies) for sample in samples]
    answers = [sample["judgement"] for sample in judged if "judge" in sample]
    unparsable = sum(answer["unparsable"] for answer in answers)
    logger.info(
        f"{folder.name}: {judge.name} judged {len(answers)} answers; replies to {unparsable} could not be parsed"
    )
    return _write_back(folder, judged)


def ask_all(wanted: Iterable[Call], judge: Judge, replies: JudgeReplies, *, label: str, again: bool = False) -> None:
    prompts = replies.left(wanted, again=again)

    def ask(prompt: str) -> None:
        # Save each reply on arrival, so that a failing concurrent request loses nothing.
        replies.add(prompt, judge.ask(prompt))

    with progress_bar(label, len(prompts)) as advance, ThreadPoolExecutor(judge.width) as pool:
        for start in range(0, len(prompts), judge.width):
            for _ in pool.map(ask, prompts[start : start + judge.width]):
                advance(1, "")


def reply_tokens(again: bool) -> int:
    """Maximum tokens of a reply. Retries get more, because the first reply may have been cut off."""
    return REPLY_TOKENS * (2 if again else 1)


def _apply_judgment(sample: Sample, judge: str, replies: JudgeReplies) -> Sample:
    if "judge" not in sample:
        return sample
    case = sample["judge"]
    asked = calls(case["protocol"], case, sample["output"])
    parsed = [_parse_cached(call, replies) for call in asked]
    value = score(case["protocol"], parsed)
    said = {call.name: reply for call, reply in zip(asked, parsed, strict=True)}
    return {**sample, "score": value, "judgement": {"judge": judge, "said": said, "unparsable": value is None}}


def read_samples(folder: Path) -> list[Sample]:
    """Read the answers. Raises DataError if the folder is damaged, because judging writes a new manifest."""
    damage = find_damage(folder)
    if damage is not None:
        raise DataError(f"{folder}: {damage}; score the model again before judging its answers.")
    return [json.loads(line) for line in (folder / SAMPLES).read_text(encoding="utf-8").split("\n") if line]


def _parse_cached(call: Call, replies: JudgeReplies) -> Reply | None:
    text = replies.get(call.prompt)
    return None if text is None else call.parse(text)


def _calls(samples: Sequence[Sample]) -> Iterator[Call]:
    for sample in samples:
        if "judge" in sample:
            yield from calls(sample["judge"]["protocol"], sample["judge"], sample["output"])


def _write_back(folder: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    manifest = read_manifest(folder)
    assert manifest is not None, "scores_folders returns only folders with a manifest"
    evals = [eval_adapter().validate_python(entry) for entry in manifest["settings"]["evals"]]
    before = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    backend = before.get("backend", {"kind": "transformers"})
    summary = summarize(before["model"], evals, samples, backend, before.get("beyond_context"))
    beside = folder.with_name(f"{folder.name}.{JUDGEMENTS}")
    same = {name: manifest[name] for name in ("kind", "inputs", "settings")}
    with publish(folder, **same) as draft:
        draft.counts |= manifest["counts"]
        shutil.copytree(folder, draft.folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        write_atomic(draft.folder / SAMPLES, "".join(json.dumps(sample) + "\n" for sample in samples))
        write_atomic(draft.folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
        if beside.exists():
            shutil.copyfile(beside, draft.folder / JUDGEMENTS)
    beside.unlink(missing_ok=True)
    return summary


# Agreement of a judge with human grades, from 0 to 3
GRADES = 4


@dataclass(frozen=True, kw_only=True)
class Agreement(Result):
    """Agreement of a judge with human grades.

    Example:
        >>> import unspool
        >>> unspool.Agreement(n=3, unparsable=0, agreement=1.0, kappa=1.0, weighted_kappa=1.0).to_dict()["n"]
        3
    """

    n: int
    unparsable: int
    agreement: float | None  # share of equal grades
    kappa: float | None  # Cohen's
    weighted_kappa: float | None  # with quadratic weights, so that near misses count less

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def print(self, console: Console) -> None:
        for name, value in self.to_dict().items():
            shown = MISSING if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
            console.print(f"{name.replace('_', ' ')}: {shown}")


def measure_agreement(path: Path, judge: Judge, replies: JudgeReplies, *, again: bool = False) -> Agreement:
    """Let the judge grade answers that have human grades."""
    cases = read_labeled(path)
    asked = [calls("qa", case, str(case["output"]))[0] for case in cases]
    ask_all(asked, judge, replies, label="judge check", again=again)
    parsed = [_parse_cached(call, replies) for call in asked]
    pairs = [
        (int(case["label"]), reply["fluency"] * reply["correctness"])
        for case, reply in zip(cases, parsed, strict=True)
        if reply is not None
    ]
    return agreement(pairs, unparsable=len(cases) - len(pairs))


def read_labeled(path: Path) -> list[Record]:
    cases = read_records(str(path))
    for case in cases:
        good = case.get("label") in range(GRADES) and {"question", "output"} <= case.keys()
        if not good or not isinstance(case.get("references"), list) or not case["references"]:
            raise DataError(
                f"{path}: line {case['_line']} needs question, references (a list), output and label "
                f"(0 to {GRADES - 1})."
            )
    return cases


def agreement(pairs: Sequence[tuple[int, int]], *, unparsable: int = 0) -> Agreement:
    n = len(pairs)
    if not n:
        return Agreement(n=0, unparsable=unparsable, agreement=None, kappa=None, weighted_kappa=None)
    return Agreement(
        n=n,
        unparsable=unparsable,
        agreement=sum(a == b for a, b in pairs) / n,
        kappa=_kappa(pairs, lambda a, b: float(a != b)),
        weighted_kappa=_kappa(pairs, lambda a, b: float((a - b) ** 2)),
    )


def _kappa(pairs: Sequence[tuple[int, int]], weight: Any) -> float | None:
    """Return 1 − observed ÷ expected disagreement. None if all grades are equal."""
    n = len(pairs)
    observed = sum(weight(a, b) for a, b in pairs) / n
    expected = sum(weight(a, b) for a, _ in pairs for _, b in pairs) / n**2
    return 1 - observed / expected if expected else None


def local_judge(backend: Backend, max_tokens: int = REPLY_TOKENS) -> Callable[[str], str]:
    """Return a function that asks a local model, which needs a chat template."""
    encoder = PromptEncoder(backend.tokenizer)
    if not encoder.has_template:
        raise ConfigError("the judge's tokenizer has no chat template; use an instruction-tuned model.")

    def ask(prompt: str) -> str:
        asked = Question(context=prompt, question="", references=("",))
        ids = encoder.ids(asked, chat=True)
        question = PromptQuestion(ids=ids[-1:], reference="", depth=None)
        made = Prompt(
            suite="judge",
            length=len(ids) + max_tokens,
            index=0,
            context_ids=ids[:-1],
            questions=[question],
            answer_tokens=max_tokens,
            match="contains",
        )
        return backend.answers(made)[0]

    return ask
