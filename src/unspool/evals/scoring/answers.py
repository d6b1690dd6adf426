"""Short answers: equal, contained, or sharing words with a reference.

In: an output, references, the mode. Out: 0 to 1, the best over references.
Promise: an empty output scores 0 in `fixed` mode. `reference` follows HELMET's scripts, in which a reference that
normalises to nothing ("The") is contained in everything, and the answer cue that is put before an output
of a base model counts as a part of it.
Elsewhere: long answers (rouge.py), rankings (ranking.py), LV-Eval's gate (keywords.py).
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from unspool.core.config import lookup
from unspool.evals.prompts import Match
from unspool.evals.suite import Mode

# What answers are compared by: letter case, punctuation, articles and spaces taken away.


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII = str.maketrans("", "", string.punctuation)
_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠"
    "［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_WIDE = str.maketrans("", "", string.punctuation + _CHINESE)


def normalize(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces; articles go after punctuation, as "a." is one."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_ASCII)).split())


def normalize_zh(text: str) -> str:
    """Lower case, no punctuation of either script, no spaces."""
    return "".join(text.lower().translate(_WIDE).split())


Metric = Callable[[str, str], float]
CLOSED = ("yes", "no", "noanswer")


def exact_match(output: str, reference: str) -> float:
    return float(_comparable(output, reference) == _comparable(reference, reference))


def exact_match_reference(output: str, reference: str) -> float:
    return float(normalize(output) == normalize(reference))


def sub_em(output: str, reference: str) -> float:
    """Whether the output holds the reference, both normalised; inside a longer word counts too, as in HELMET."""
    wanted = _comparable(reference, reference)
    return float(bool(wanted) and wanted in _comparable(output, reference))


def sub_em_reference(output: str, reference: str) -> float:
    return float(normalize(reference) in normalize(output))


def _comparable(text: str, reference: str) -> str:
    """Normalised, unless that would leave nothing of the reference: then only spaces and letter case are evened."""
    return normalize(text) if normalize(reference) else " ".join(text.lower().split())


def shared_f1(output: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of words as multisets; 0 where nothing is shared, also if both are empty."""
    shared = (Counter(output) & Counter(reference)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(output), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def token_f1(output: str, reference: str) -> float:
    """SQuAD's F1 over normalised words."""
    return shared_f1(normalize(output).split(), normalize(reference).split())


def closed_f1(output: str, reference: str) -> float:
    """HELMET's F1: "yes", "no" and "noanswer" score only against themselves."""
    given, wanted = normalize(output), normalize(reference)
    if given != wanted and (given in CLOSED or wanted in CLOSED):
        return 0.0
    return token_f1(output, reference)


def best(metric: Metric, output: str, references: Iterable[str]) -> float:
    return max((metric(output, reference) for reference in references), default=0.0)


def accuracy(given: Sequence[object], wanted: Sequence[object]) -> float | None:
    """The share of equal answers; None of none."""
    if not wanted:
        return None
    return sum(mine == yours for mine, yours in zip(given, wanted, strict=True)) / len(wanted)


def parse_answer(output: str, cue: str = "Answer:") -> str:
    """What stands after the first cue on its line, else the first line; a cue said twice is taken away too."""
    after = re.search(rf"{re.escape(cue)}(.*)", output, flags=re.IGNORECASE)
    line = after[1] if after else output.split("\n", 1)[0]
    return re.sub(rf"^{re.escape(cue)}", "", line.strip(), flags=re.IGNORECASE).strip()


def raw_or_parsed(metric: Metric, output: str, references: Sequence[str], cue: str, mode: Mode) -> float:
    """HELMET's rule: the better of the whole output and its parsed line.

    `output` is what the model wrote after the cue. `reference` puts the cue back and scores it with the rest.
    """
    if mode == "reference":
        output = cue + output
    return max(best(metric, output, references), best(metric, parse_answer(output, cue), references))


# Is an answer right? Pure functions from output and reference to 0 or 1.


def score_answer(output: str, reference: str, match: Match) -> float:
    return float(lookup(SCORERS, match, kind="match")(output.strip().lower(), reference.lower()))


def _starts_with(output: str, reference: str) -> bool:
    """The answer is the first word: "river." counts for river, "riverbank" and "the river" do not."""
    return re.match(rf"{re.escape(reference)}(?![\w-])", output) is not None


def _contains(output: str, reference: str) -> bool:
    """The answer stands on the first line, not as a part of something longer."""
    first_line = output.split("\n", 1)[0]
    return re.search(rf"(?<![\w-]){re.escape(reference)}(?![\w-])", first_line) is not None


SCORERS = {"start": _starts_with, "contains": _contains}
