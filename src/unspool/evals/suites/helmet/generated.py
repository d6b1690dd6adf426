"""A made-up world: passages, questions, labelled sentences and stories that need no download.

In: a number, and for labelled sentences the shipped words. Out: the same things for the same number, everywhere.
Promise: names are all different, so a question has one answer; any number of passages can be asked for.
They stand in where no file is given: for tests, for offline runs, for a first look. Results say `generated`.
"""

from functools import lru_cache

from unspool.core.rng import rng_for
from unspool.data.facts import word_list
from unspool.evals.suites.helmet.records import Item, Passage

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_NAMES = len(_SYLLABLES) ** 3
_STEP = 104_729  # a prime that shares no factor with `_NAMES`: it leads through all names before one comes again
_TRADES = ["glass", "salt", "paper", "rope", "lamps", "clocks", "boats", "tiles", "honey", "wool", "bells", "maps"]
_LANDS = ["valley", "coast", "island", "plain", "river", "delta", "hill", "country", "lake", "district", "forest"]
_WHO = ["smith", "sailor", "teacher", "printer", "miller", "weaver", "doctor", "painter"]
# Numbers of passages are far apart for questions, for what fills a pool, and for endless filling.
POOL, ENDLESS = 20_000, 60_000
QUESTIONS, POOL_SIZE = 400, 600
LABEL_NAMES = 5_000_000


def name(number: int) -> str:
    at = number * _STEP % _NAMES
    size = len(_SYLLABLES)
    return (_SYLLABLES[at // size // size] + _SYLLABLES[at // size % size] + _SYLLABLES[at % size]).capitalize()


def facts(number: int) -> dict[str, str]:
    """A firm: what it is called, who founded it, where and when, what it makes, who followed."""
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


def pool() -> list[Passage]:
    return [filler(POOL + number) for number in range(POOL_SIZE)]


def endless(number: int) -> Passage:
    return filler(ENDLESS + number)


_ASKED = (
    ("Who founded {firm}?", "founder"),
    ("In which town does {firm} make {goods}?", "city"),
    ("Who took over {firm} after its founder?", "heir"),
)


@lru_cache(8)
def questions(task: str, count: int = QUESTIONS) -> list[Item]:
    return [_question(task, number) for number in range(count)]


def _question(task: str, number: int) -> Item:
    # Tasks ask about different firms, so that the seven categories are not one and the same.
    at = TASK_NUMBERS[task] * QUESTIONS + number
    known = facts(at)
    identity = f"{task}-{number}"
    if task == "hotpotqa":
        asked = "In which town was the founder of {firm} born?".format(**known)
        return Item(id=identity, question=asked, answers=(known["birthplace"],), gold=(firm(at), person(at)))
    if task == "msmarco":
        near = tuple(_near(at, other) for other in range(4))
        asked = "{firm} {goods} founder and history".format(**known)
        return Item(id=identity, question=asked, answers=(), gold=(firm(at), person(at)), grades=(2, 1), others=near)
    if task in ("asqa", "qampari"):
        pairs = [[known["founder"]], [known["year"]], [known["birthplace"]]]
        answer = "{firm} was founded by {founder} [1] in {year} [1]. The founder was born in {birthplace} [2]."
        wanted = answer.format(**known) if task == "asqa" else ", ".join(f"{pair[0]} [1]" for pair in pairs)
        asked = "Who founded {firm}, when, and where was the founder born?".format(**known)
        return Item(id=identity, question=asked, answers=(wanted,), gold=(firm(at), person(at)), extra={"pairs": pairs})
    text, field = _ASKED[number % len(_ASKED)]
    return Item(id=identity, question=text.format(**known), answers=(known[field],), gold=(firm(at),))


def _near(number: int, other: int) -> Passage:
    """About another firm of the same trade, so that words alone do not decide."""
    known = {**facts(POOL + 10 * number + other), "goods": facts(number)["goods"]}
    return Passage("", "A history of {firm}: its founder {founder} made {goods} in {city}.".format(**known))


_SHORT = ("nq", "triviaqa", "hotpotqa", "popqa", "msmarco", "asqa", "qampari")
_LONG = ("narrativeqa", "infbench_qa", "infbench_mc", "infbench_sum", "multi_lexsum")
TASK_NUMBERS = {task: number for number, task in enumerate(_SHORT + _LONG)}


@lru_cache(8)
def labelled(task: str, labels: int, count: int, split: str) -> list[tuple[str, str]]:
    """Sentences with labels: a label has two made-up words, one of which every sentence of it holds."""
    words = word_list()
    first = LABEL_NAMES + 1000 * sum(map(ord, task))
    found = []
    for number in range(count):
        rng = rng_for(0, "helmet sentence", task, split, number)
        label = number % labels
        said = [words[at] for at in rng.integers(len(words), size=int(rng.integers(4, 9)))]
        # One of two words that only this label has.
        said.insert(int(rng.integers(len(said) + 1)), name(first + 2 * label + int(rng.integers(2))).lower())
        found.append((" ".join(said), name(first + 2 * label).lower()))
    return found
