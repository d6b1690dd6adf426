"""Questions about people and buildings that never were, for use without SQuAD and HotpotQA.

Out: `Questions` of the same shape: paragraphs of one town form an article; a two-hop question needs two documents.
Promise: always the same set; no answer can be known without the documents; names, and what is asked about a person,
are unique, so only the gold documents answer a question.
"""

from collections.abc import Iterator

import numpy as np

from unspool.base.rng import rng_for
from unspool.eval.ruler.qa_data import Questions, Raw, collected, titled

ORIGIN = "generated"
_NUM_TOWNS = 60
_PEOPLE_PER_TOWN = 20
# Documents that a two-hop question shows in any case, as HotpotQA's do.
_SHOWN = 10

_ONSETS = "b br c cl d dr f g gr h j k l m n p r s st t tr v w"
_VOWELS = "a e i o u ai ea o"
_CODAS = "l n r s t nd rn lm sk th"
_TRADES = "baker cooper dyer farrier glazier joiner mason miller potter saddler tanner weaver"
_INSTRUMENTS = "bagpipe cello clarinet fiddle flute guitar harp horn lute oboe organ trumpet viola zither"
_PETS = "cat dog goat goose hen jackdaw parrot pony rabbit tortoise"
_SHOPS = "bakery bookshop brewery chandlery dairy forge pharmacy printing-house rope-walk tea-room"
_BUILDINGS = "bridge chapel granary library lighthouse market-hall theatre town-hall watch-tower"
_STONES = "basalt brick chalk-stone flint granite limestone marble oak sandstone slate"
_WEATHER = (
    "The winters there were long, and the river often froze from one bank to the other.",
    "Letters from those years speak of a quiet life with few visitors and many books.",
    "The neighbours remembered a patient voice and a habit of walking before sunrise.",
    "Most of what is known of that time comes from the account books of the parish.",
    "The house stood near the old ferry, and travellers used to ask there for the way.",
    "In the evenings the family sat in the kitchen, where the only good lamp hung.",
)


def made_squad() -> Questions:
    """One paragraph per person; three questions on each."""
    raw = [
        Raw(question, [answer], (person.text,), (person.text,), person.town)
        for person in _people()
        for question, answer in person.facts
    ]
    return collected(raw, ORIGIN)


def made_hotpotqa() -> Questions:
    """Who built it, and of what is it made? One document on the person, one on the building."""
    rng = rng_for(0, "ruler", "two hops")
    pairs = [(person, *_building(person, rng)) for person in _people()]
    raw = []
    for person, building, text, stone in pairs:
        golds = [titled(person.name, person.text), text]
        mates = [titled(mate.name, mate.text) for mate, *_ in pairs if mate.town == person.town and mate is not person]
        shown = golds + [mates[at] for at in rng.permutation(len(mates))[: _SHOWN - len(golds)]]
        asked = f"Of what material are the walls of the {building} that was founded by the owner of {person.pet}?"
        raw.append(Raw(asked, [stone], golds, [shown[at] for at in rng.permutation(len(shown))]))
    return collected(raw, ORIGIN, [text for _, _, text, _ in pairs])


class _Person:
    def __init__(self, name: str, town: str, pet: str, rng: np.random.Generator) -> None:
        self.name, self.town = name, town
        trade, instrument, shop = (_one(kind, rng) for kind in (_TRADES, _INSTRUMENTS, _SHOPS))
        animal, born = _one(_PETS, rng), int(rng.integers(1701, 1860))
        opened = born + int(rng.integers(20, 50))
        self.pet = f"a {animal} called {pet}"
        first, second = (_WEATHER[at] for at in rng.permutation(len(_WEATHER))[:2])
        self.text = (
            f"{name} was born in {town} in {born}, the child of a {trade}, and learned to play the {instrument} before "
            f"learning to read. {first} In {opened} {name} opened a {shop} in the high street of {town}, which stayed "
            f"in the family for three generations. {second} For many years {name} was seen about the town with "
            f"{self.pet}, and both are shown together on the only portrait that is left."
        )
        self.facts = [
            (f"Which instrument did {name} learn to play?", instrument),
            (f"In which year did {name} open a {shop}?", str(opened)),
            (f"What was the name of the {animal} of {name}?", pet),
        ]


def _building(person: _Person, rng: np.random.Generator) -> tuple[str, str, str]:
    """What it is called, the document about it, and its material."""
    kind, stone = _one(_BUILDINGS, rng), _one(_STONES, rng)
    family = person.name.split()[1]
    first, second = (_WEATHER[at] for at in rng.permutation(len(_WEATHER))[:2])
    text = (
        f"The {family} {kind} of {person.town} was founded by {person.name} and finished after {rng.integers(2, 19)} "
        f"years of work. {first} Its walls are made of {stone}, which had to be brought from far away. {second}"
    )
    return kind, titled(f"{family} {kind}", text), stone


def _people() -> list[_Person]:
    rng = rng_for(0, "ruler", "people")
    names = _names(rng)
    towns = [next(names) for _ in range(_NUM_TOWNS)]
    return [
        _Person(f"{next(names)} {next(names)}", town, next(names), rng)
        for town in towns
        for _ in range(_PEOPLE_PER_TOWN)
    ]


def _names(rng: np.random.Generator) -> Iterator[str]:
    """Invented names of two or three syllables, none twice, none part of another."""
    known: set[str] = set()
    while True:
        syllables = [_one(_ONSETS, rng) + _one(_VOWELS, rng) for _ in range(int(rng.integers(2, 4)))]
        name = "".join(syllables).capitalize() + _one(_CODAS, rng)
        if name not in known and len(name) > 5:
            known.add(name)
            yield name


def _one(words: str, rng: np.random.Generator) -> str:
    options = words.split()
    return options[int(rng.integers(len(options)))]
