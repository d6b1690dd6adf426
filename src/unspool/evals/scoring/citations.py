"""ALCE's scores of answers with citations: correctness, and support by cited documents.

HELMET uses a changed copy of ALCE's script. It reads all lines of an output (ALCE: the first line) and skips sentences
with fewer than five characters. `script` selects one; HELMET's scores use HELMET's.

`citations` takes any function that decides whether a text entails a sentence. In `reference` mode, an output without a
sentence is None, "[0]" cites the last document, out-of-range citations do not lower precision, and every output
contains a short answer that normalizes to nothing ("The"). `fixed` mode scores such an output 0, treats "[0]" as out of
range, counts out-of-range citations, and never finds such a short answer.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from unspool.evals.scoring.answers import normalize
from unspool.evals.suite import Mode

Entails = Callable[[str, str], bool]  # premise, claim
Script = Literal["helmet", "alce"]
MOST_CITATIONS = 3
SHORTEST_SENTENCE = {"helmet": 5, "alce": 0}  # characters; in HELMET, "1." is not a sentence
_END = re.compile(r"(?<=[.!?])(?:(?:\s*\[\d+\])+)?\s+(?=[\"'(\[]?[A-Z0-9])")


@dataclass(frozen=True)
class CitationScore:
    recall: float  # share of sentences that their citations entail
    precision: float  # share of citations that are needed


def one_line(output: str, script: Script = "helmet") -> str:
    """Return the scored text of an output: HELMET replaces newlines by spaces, ALCE takes the first line."""
    line = re.sub(r"\n+", " ", output) if script == "helmet" else output.strip().split("\n")[0]
    return line.replace("<|im_end|>", "")


def remove_citations(text: str) -> str:
    return re.sub(r"\[\d+", "", re.sub(r" \[\d+", "", text)).replace(" |", "").replace("]", "")


def sentences(text: str) -> list[str]:
    """Split after a period, question or exclamation mark before a capital letter or digit.

    HELMET uses NLTK's punkt instead. Citations after the period stay with their sentence.
    """
    starts = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    return [text[start:end].strip() for start, end in pairwise(starts) if text[start:end].strip()]


def str_em(
    output: str, short_answers: Sequence[Sequence[str]], mode: Mode = "fixed", script: Script = "helmet"
) -> float:
    """Return the share of ASQA's sub-questions with a short answer in the output."""
    text = normalize(remove_citations(one_line(output, script)))

    def is_found(answer: str) -> bool:
        wanted = normalize(answer)
        return wanted in text and (bool(wanted) or mode == "reference")

    return sum(any(map(is_found, answers)) for answers in short_answers) / len(short_answers)


def list_items(output: str) -> list[str]:
    """Split a QAMPARI answer at commas. Removes a final period or comma."""
    return [item.strip() for item in output.rstrip().rstrip(".").rstrip(",").split(",")]


def qampari(output: str, answers: Sequence[Sequence[str]], script: Script = "helmet") -> dict[str, float]:
    """Return precision, recall and recall_top5 (min(5, hits) / min(5, answers)). Answers are lists of aliases."""
    items = [item for item in map(normalize, list_items(remove_citations(one_line(output, script)))) if item]
    wanted = [[normalize(alias) for alias in aliases] for aliases in answers]
    all_aliases = {alias for aliases in wanted for alias in aliases}
    hits = sum(any(alias in items for alias in aliases) for aliases in wanted)
    return {
        "precision": sum(item in all_aliases for item in items) / len(items) if items else 0.0,
        "recall": hits / len(wanted),
        "recall_top5": min(5, hits) / min(5, len(wanted)),
    }


def claims_of(
    output: str,
    *,
    question: str | None,
    split: Callable[[str], list[str]] = sentences,
    script: Script = "helmet",
) -> list[str]:
    """Return the claims to check: sentences, or the question with each item for a list (QAMPARI)."""
    text = one_line(output, script)
    if question is not None:
        return [f"{question} {item}" for item in list_items(text)]
    return [sentence for sentence in split(text) if len(sentence.strip()) >= SHORTEST_SENTENCE[script]]


def citations(
    claims: Sequence[str], documents: Sequence[str], entails: Entails, mode: Mode = "fixed"
) -> CitationScore | None:
    """Score the citations of one output's claims. Documents have the form "Title: …\\n…"."""
    if not claims:
        return None if mode == "reference" else CitationScore(0.0, 0.0)
    supported = needed = cited = 0
    for claim in claims:
        marks = [int(mark) - 1 for mark in re.findall(r"\[(\d+)", claim)]
        outside = any(mark >= len(documents) or (mark < 0 and mode == "fixed") for mark in marks)
        if not marks or outside:
            cited += len(marks[:MOST_CITATIONS]) if mode == "fixed" else 0
            continue
        marks = marks[:MOST_CITATIONS]
        cited += len(marks)
        bare = remove_citations(claim).strip()
        if entails("\n".join(documents[mark] for mark in marks), bare):
            supported += 1
            needed += sum(_needed(at, marks, documents, bare, entails) for at in range(len(marks)))
    return CitationScore(supported / len(claims), needed / cited if cited else 0.0)


def _needed(at: int, marks: Sequence[int], documents: Sequence[str], claim: str, entails: Entails) -> bool:
    """Return True if a citation alone entails the claim, or if the other citations do not."""
    if len(marks) == 1 or entails(documents[marks[at]], claim):
        return True
    # Remove the first of equal marks, like ALCE's script.
    others = list(marks)
    others.remove(marks[at])
    return not entails("\n".join(documents[mark] for mark in others), claim)
