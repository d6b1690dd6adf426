"""Answers with citations, as ALCE judges them: right, and borne out by what they cite.

In: an output with marks such as [3], the documents, a function that says whether a text entails a sentence.
Out: shares. `reference` follows HELMET's script: an output without a sentence is left out of the mean (None),
"[0]" cites the last document, and citations of a sentence that cites out of range do not lower precision. `fixed`
scores the first 0, takes the second for out of range and counts the third.
Elsewhere: the entailment model (a judge's business), sentence splitting beyond the rule here (`sentences`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from unspool.evals.scoring.answers import normalize
from unspool.evals.suite import Mode

Entails = Callable[[str, str], bool]  # premise, claim
MOST_CITATIONS = 3
SHORTEST_SENTENCE = 5  # "1." is no sentence
_END = re.compile(r"(?<=[.!?])(?:(?:\s*\[\d+\])+)?\s+(?=[\"'(\[]?[A-Z0-9])")


@dataclass(frozen=True)
class Cited:
    recall: float  # sentences that what they cite entails, of all
    precision: float  # citations that are needed, of all


def one_line(output: str) -> str:
    """What ALCE scores: new lines become spaces."""
    return re.sub(r"\n+", " ", output).replace("<|im_end|>", "")


def remove_citations(text: str) -> str:
    return re.sub(r"\[\d+", "", re.sub(r" \[\d+", "", text)).replace(" |", "").replace("]", "")


def sentences(text: str) -> list[str]:
    """Split after a full stop, question or exclamation mark that a capital or a digit follows.

    A plain rule; HELMET calls NLTK's punkt. Marks that follow the full stop stay with their sentence.
    """
    starts = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    return [text[start:end].strip() for start, end in pairwise(starts) if text[start:end].strip()]


def str_em(output: str, short_answers: Sequence[Sequence[str]]) -> float:
    """ASQA: the share of sub-questions of which any short answer is said."""
    said = normalize(remove_citations(one_line(output)))
    found = [any(normalize(answer) in said for answer in answers if normalize(answer)) for answers in short_answers]
    return sum(found) / len(found)


def list_items(output: str) -> list[str]:
    """QAMPARI: what stands between commas, without a last full stop or comma."""
    return [item.strip() for item in output.rstrip().rstrip(".").rstrip(",").split(",")]


def qampari(output: str, answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and recall_top5 (min(5, hits) / min(5, answers)) of a list; answers have aliases."""
    items = [item for item in map(normalize, list_items(remove_citations(one_line(output)))) if item]
    wanted = [[normalize(alias) for alias in aliases] for aliases in answers]
    everything = {alias for aliases in wanted for alias in aliases}
    hits = sum(any(alias in items for alias in aliases) for aliases in wanted)
    return {
        "precision": sum(item in everything for item in items) / len(items) if items else 0.0,
        "recall": hits / len(wanted),
        "recall_top5": min(5, hits) / min(5, len(wanted)),
    }


def claims_of(output: str, *, question: str | None, split: Callable[[str], list[str]] = sentences) -> list[str]:
    """What is checked: sentences, or for a list (QAMPARI) the question with each item."""
    text = one_line(output)
    if question is not None:
        return [f"{question} {item}" for item in list_items(text)]
    return [sentence for sentence in split(text) if len(sentence.strip()) >= SHORTEST_SENTENCE]


def citations(claims: Sequence[str], documents: Sequence[str], entails: Entails, mode: Mode = "fixed") -> Cited | None:
    """Recall and precision of one output's claims; documents as "Title: …\\n…"."""
    if not claims:
        return None if mode == "reference" else Cited(0.0, 0.0)
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
    return Cited(supported / len(claims), needed / cited if cited else 0.0)


def _needed(at: int, marks: Sequence[int], documents: Sequence[str], claim: str, entails: Entails) -> bool:
    """A citation is needed if it entails the claim alone, or if the others do not without it."""
    if len(marks) == 1 or entails(documents[marks[at]], claim):
        return True
    # The first of equal marks goes, as in ALCE's script: what remains is the same text in another order.
    others = list(marks)
    others.remove(marks[at])
    return not entails("\n".join(documents[mark] for mark in others), claim)
