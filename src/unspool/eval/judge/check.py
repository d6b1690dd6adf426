"""How far a judge agrees with people: on answers that people have graded 0 to 3.

In: JSONL with `question`, `references`, `output` and `label`. Out: agreement, Cohen's kappa, what could not be read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.base.errors import DataError
from unspool.eval.judge.protocols import calls
from unspool.eval.judge.run import Judge, Kept, ask_all

GRADES = 4


@dataclass(frozen=True, kw_only=True)
class Agreement:
    n: int
    unparsable: int
    agreement: float | None  # share of equal grades
    kappa: float | None  # beyond chance
    weighted_kappa: float | None  # near misses count less than far ones


def check_judge(path: Path, judge: Judge, kept: Kept) -> Agreement:
    cases = labelled(path)
    asked = [calls("qa", case, str(case["output"]))[0] for case in cases]
    ask_all(iter(asked), judge, kept, label="judge check")
    replies = [call.parse(kept.get(call.prompt) or "") for call in asked]
    pairs = [
        (int(case["label"]), reply["fluency"] * reply["correctness"])
        for case, reply in zip(cases, replies, strict=True)
        if reply is not None
    ]
    return agreement(pairs, unparsable=len(cases) - len(pairs))


def labelled(path: Path) -> list[dict[str, Any]]:
    cases = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
            good = case["label"] in range(GRADES) and isinstance(case["references"], list) and case["references"]
            case["question"], case["output"]
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise DataError(
                f"{path}: line {number} needs question, references (a list), output and label (0 to {GRADES - 1})."
            )
        cases.append(case)
    if not cases:
        raise DataError(f"{path} holds no labelled answers.")
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
    """1 − observed ÷ expected disagreement; None where everybody always says the same, which leaves no chance."""
    n = len(pairs)
    observed = sum(weight(a, b) for a, b in pairs) / n
    expected = sum(weight(a, b) for a, _ in pairs for _, b in pairs) / n**2
    return 1 - observed / expected if expected else None
