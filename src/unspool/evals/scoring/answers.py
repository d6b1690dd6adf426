"""Scores of short answers, in [0, 1]: exact match or containment.

An empty output scores 0 in `fixed` mode. `reference` follows HELMET's scripts. There, every output contains a reference
that normalizes to nothing ("The"), and the answer prefix counts as part of a base model's output.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from unspool.core.config import lookup
from unspool.evals.prompts import Match

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII = str.maketrans("", "", string.punctuation)
_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠"
    "［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_WIDE = str.maketrans("", "", string.punctuation + _CHINESE)


def normalize(text: str) -> str:
    """Lowercase, remove punctuation, then articles (so "a." is an article), and collapse spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_ASCII)).split())


def normalize_zh(text: str) -> str:
    """Lowercase, and remove Western and Chinese punctuation and all spaces."""
    return "".join(text.lower().translate(_WIDE).split())


Metric = Callable[[str, str], float]


def exact_match(output: str, reference: str) -> float:
    return float(_comparable(output, reference) == _comparable(reference, reference))


def exact_match_reference(output: str, reference: str) -> float:
    return float(normalize(output) == normalize(reference))


def sub_em(output: str, reference: str) -> float:
    """Return 1 if the normalized output contains the normalized reference, even within a word, as in HELMET."""
    wanted = _comparable(reference, reference)
    return float(bool(wanted) and wanted in _comparable(output, reference))


def sub_em_reference(output: str, reference: str) -> float:
    return float(normalize(reference) in normalize(output))


def _comparable(text: str, reference: str) -> str:
    """Normalize. If the reference would become empty, only lowercase and collapse spaces."""
    return normalize(text) if normalize(reference) else " ".join(text.lower().split())


def shared_f1(output: Sequence[str], reference: Sequence[str]) -> float:
    """Return the F1 of word multisets; 0 if both are empty."""
    shared = (Counter(output) & Counter(reference)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(output), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def best(metric: Metric, output: str, references: Iterable[str]) -> float:
    return max((metric(output, reference) for reference in references), default=0.0)


def parse_answer(output: str, cue: str = "Answer:") -> str:
    """Return the rest of the line after the first cue, else the first line. Removes a repeated cue."""
    after = re.search(rf"{re.escape(cue)}(.*)", output, flags=re.IGNORECASE)
    line = after[1] if after else output.split("\n", 1)[0]
    return re.sub(rf"^{re.escape(cue)}", "", line.strip(), flags=re.IGNORECASE).strip()


def raw_or_parsed(metric: Metric, output: str, references: Sequence[str], cue: str) -> float:
    """Score the whole output and its parsed line, and return the better score, like HELMET."""
    return max(best(metric, output, references), best(metric, parse_answer(output, cue), references))


def score_answer(output: str, reference: str, match: Match) -> float:
    return float(lookup(SCORERS, match, kind="match")(output.strip().lower(), reference.lower()))


def _starts_with(output: str, reference: str) -> bool:
    """Accept "river." for river, but not "riverbank" or "the river"."""
    return re.match(rf"{re.escape(reference)}(?![\w-])", output) is not None


def _contains(output: str, reference: str) -> bool:
    """Accept the reference as a whole word on the first line."""
    first_line = output.split("\n", 1)[0]
    return re.search(rf"(?<![\w-]){re.escape(reference)}(?![\w-])", first_line) is not None


def _mentions(output: str, reference: str) -> bool:
    """Accept the reference as a whole word on any line."""
    return any(_contains(line, reference) for line in output.split("\n"))


SCORERS = {"start": _starts_with, "contains": _contains, "mentions": _mentions}
