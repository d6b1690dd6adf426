"""Generated texts for use without files: passages, questions, labeled sentences and stories.

The same number gives the same passage on every machine. All names are distinct, so each question has one answer.
"""

from functools import lru_cache
from typing import Any

from unspool.core.rng import rng_for
from unspool.data.facts import word_list
from unspool.evals.fill import Meter
from unspool.evals.suites.records import Item, Passage

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_NAMES = len(_SYLLABLES) ** 3
_STEP = 104_729  # a prime, coprime to `_NAMES`: all names are used before one repeats
_TRADES = ["glass", "salt", "paper", "rope", "lamps", "clocks", "boats", "tiles", "honey", "wool", "bells", "maps"]
_LANDS = ["valley", "coast", "island", "plain", "river", "delta", "hill", "country", "lake", "district", "forest"]
_WHO = ["smith", "sailor", "teacher", "printer", "miller", "weaver", "doctor", "painter"]
# First passage number of the pool, and of passages beyond the pool.
POOL, ENDLESS = 20_000, 60_000
QUESTIONS, POOL_SIZE = 400, 600
LABEL_NAMES = 5_000_000


def name(number: int) -> str:
    at = number * _STEP % _NAMES
    size = len(_SYLLABLES)
    return (_SYLLABLES[at // size // size] + _SYLLABLES[at // size % size] + _SYLLABLES[at % size]).capitalize()


def facts(number: int) -> dict[str, str]:
    """Return facts about a firm: its name, founder, place, year, goods and so on."""
    rng = rng_for(0, "helmet firm", number)
    place = 10 * number
    return {
        "firm": f"{name(place)} {name(place + 1)}",
        "founder": f"{name(place + 2)} {name(place + 3)}",
        "city": name(place + 4),
        "year": str(int(rng.integers(1500, 2000))),
        "goods": _TRADES[int(rng.integers(len(_TRADES)))],
        "land": _LANDS[int(rng.integers(len(_LANDS)))],
        "who": _WHO[int(rng.integers(len(_WHO)))],
        "heir": f"{name(place + 5)} {name(place + 6)}",
        "birthplace": name(place + 7),
        "workers": str(int(rng.integers(20, 900))),
    }


def firm(number: int) -> Passage:
    text = (
        "{firm} is a firm that makes {goods} in the town of {city}, in the {land} of the same name. It was founded in "
        "{year} by the {who} {founder}, who led it for many years. At its height it had {workers} workers, most of "
        "whom lived near the old market. After the founder had retired, {heir} took over and moved the workshop to "
        "a larger house beside the river. {firm} still sells its {goods} in the whole region."
    )
    known = facts(number)
    return Passage(known["firm"], text.format(**known))


def person(number: int) -> Passage:
    text = (
        "{founder} was a {who} who was born in {birthplace} and came to {city} as a child. In {year} the {who} "
        "founded {firm} with money that friends had lent. Letters from that time tell of long winters, of {goods} sold "
        "from door to door and of a quarrel with the town. The last years were spent in the house of a sister."
    )
    known = facts(number)
    return Passage(known["founder"], text.format(**known))


@lru_cache(1 << 14)
def filler(number: int) -> Passage:
    return (firm if number % 2 else person)(number // 2)


def meter(tokenizer: Any) -> Meter:
    """Build a token counter. Fast tokenizers are checked on the pool's passages."""
    return Meter(tokenizer, [passage.text for passage in pool()[:100]])


def pool() -> list[Passage]:
    return [filler(POOL + number) for number in range(POOL_SIZE)]


def endless(number: int) -> Passage:
    return filler(ENDLESS + number)


_QUESTIONS = (
    ("Who founded {firm}?", "founder"),
    ("In which town does {firm} make {goods}?", "city"),
    ("Who took over {firm} after its founder?", "heir"),
)


@lru_cache(8)
def questions(task: str, count: int = QUESTIONS) -> list[Item]:
    return [_question(task, number) for number in range(count)]


def _question(task: str, number: int) -> Item:
    # Tasks use different firms, so that their scores are independent.
    at = _TASK_NUMBERS[task] * QUESTIONS + number
    known = facts(at)
    item_id = f"{task}-{number}"
    if task == "hotpotqa":
        question = "In which town was the founder of {firm} born?".format(**known)
        return Item(id=item_id, question=question, answers=(known["birthplace"],), gold=(firm(at), person(at)))
    if task == "msmarco":
        near = tuple(_near(at, other) for other in range(4))
        question = "{firm} {goods} founder and history".format(**known)
        return Item(id=item_id, question=question, answers=(), gold=(firm(at), person(at)), grades=(2, 1), others=near)
    if task in ("asqa", "qampari"):
        pairs = [[known["founder"]], [known["year"]], [known["birthplace"]]]
        answer = "{firm} was founded by {founder} [1] in {year} [1]. The founder was born in {birthplace} [2]."
        wanted = answer.format(**known) if task == "asqa" else ", ".join(f"{pair[0]} [1]" for pair in pairs)
        question = "Who founded {firm}, when, and where was the founder born?".format(**known)
        return Item(
            id=item_id, question=question, answers=(wanted,), gold=(firm(at), person(at)), extra={"pairs": pairs}
        )
    text, field = _QUESTIONS[number % len(_QUESTIONS)]
    return Item(id=item_id, question=text.format(**known), answers=(known[field],), gold=(firm(at),))


def _near(number: int, other: int) -> Passage:
    """Return a passage about another firm of the same trade, so that shared words alone do not decide."""
    known = {**facts(POOL + 10 * number + other), "goods": facts(number)["goods"]}
    return Passage("", "A history of {firm}: its founder {founder} made {goods} in {city}.".format(**known))


_TASKS = "nq triviaqa hotpotqa popqa msmarco asqa qampari"
_TASKS += " narrativeqa infbench_qa infbench_mc infbench_sum multi_lexsum"
_TASK_NUMBERS = {task: number for number, task in enumerate(_TASKS.split())}


@lru_cache(8)
def labeled(task: str, labels: int, count: int, split: str) -> list[tuple[str, str]]:
    """Generate labeled sentences. Each label has two invented words; each of its sentences contains one of them."""
    words = word_list()
    first = LABEL_NAMES + 1000 * sum(map(ord, task))
    found = []
    for number in range(count):
        rng = rng_for(0, "helmet sentence", task, split, number)
        label = number % labels
        sentence = [words[at] for at in rng.integers(len(words), size=int(rng.integers(4, 9)))]
        sentence.insert(int(rng.integers(len(sentence) + 1)), name(first + 2 * label + int(rng.integers(2))).lower())
        found.append((" ".join(sentence), name(first + 2 * label).lower()))
    return found
