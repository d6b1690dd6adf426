"""World knowledge for needles that share no content word with their question.

Each kind has pairs of a clue, which the needle mentions, and a topic, which the question mentions. A needle is a
statement with a name and a clue: "{name} jogs past {clue}". Topics of one kind differ, so that of several people with
different clues only one fits a question.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Wordings and pairs of one kind of knowledge. Every statement fits every question."""

    statements: tuple[str, ...]  # with {name} and {clue}
    questions: tuple[str, ...]  # with {topic}
    pairs: dict[str, str]
    """Topics by clue."""


PLACES = Kind(
    statements=(
        "{name} jogs past {clue} every morning before breakfast.",
        "From the bedroom window, {name} looks straight at {clue}.",
        "{name} sells postcards to tourists right next to {clue}.",
    ),
    questions=("Who lives in {topic}?", "Whose home is in {topic}?", "Who is a resident of {topic}?"),
    pairs={
        "the Eiffel Tower": "Paris",
        "the Colosseum": "Rome",
        "the Brandenburg Gate": "Berlin",
        "the Sagrada Familia": "Barcelona",
        "the Parthenon": "Athens",
        "the statue of the Little Mermaid": "Copenhagen",
        "the Golden Gate Bridge": "San Francisco",
        "the Statue of Liberty": "New York",
        "the Bolshoi Theatre": "Moscow",
        "the Hagia Sophia": "Istanbul",
        "the Rijksmuseum": "Amsterdam",
        "the Rialto Bridge": "Venice",
        "the Uffizi": "Florence",
        "the Christ the Redeemer statue": "Rio de Janeiro",
        "the Prado": "Madrid",
        "the Charles Bridge": "Prague",
        "the Burj Khalifa": "Dubai",
        "Big Ben": "London",
        "the Petronas Towers": "Kuala Lumpur",
        "the Space Needle": "Seattle",
    },
)
LANGUAGES = Kind(
    statements=(
        "{name} was born and raised in {clue}.",
        "All ancestors of {name} came from {clue}, and nobody in the family ever left it.",
        "{name} went to primary school in {clue}.",
    ),
    questions=(
        "Who speaks {topic} without an accent?",
        "Whose mother tongue is {topic}?",
        "Who could read a newspaper in {topic}?",
    ),
    pairs={
        "Lisbon": "Portuguese",
        "Osaka": "Japanese",
        "Thessaloniki": "Greek",
        "Budapest": "Hungarian",
        "Krakow": "Polish",
        "Helsinki": "Finnish",
        "Seoul": "Korean",
        "Hanoi": "Vietnamese",
        "Bangkok": "Thai",
        "Tehran": "Persian",
        "Gothenburg": "Swedish",
        "Reykjavik": "Icelandic",
        "Bucharest": "Romanian",
        "Naples": "Italian",
        "Ankara": "Turkish",
        "Munich": "German",
    },
)
WORK = Kind(
    statements=(
        "{name} passes the hours until evening with {clue}.",
        "Since leaving college, {name} has earned money with {clue}.",
        "A typical Tuesday of {name} is full of {clue}.",
    ),
    questions=("Who works as {topic}?", "Who is {topic} by profession?", "Who should be called if {topic} is needed?"),
    pairs={
        "fillings, crowns and root canals": "a dentist",
        "ewes, lambs and a collie on the pasture": "a shepherd",
        "trawlers, lobster pots and cod": "a fisherman",
        "hives, queens and jars of honey": "a beekeeper",
        "bouquets, tulips and wedding wreaths": "a florist",
        "cockpits, runways and altitudes": "a pilot",
        "dough, ovens and loaves": "a baker",
        "prescriptions, ointments and cough syrup": "a pharmacist",
        "telescopes, comets and distant galaxies": "an astronomer",
        "blueprints, facades and scale models": "an architect",
        "leaking taps, clogged drains and copper pipes": "a plumber",
        "verdicts, a gavel and a black robe": "a judge",
        "hoses, ladders and burning roofs": "a firefighter",
        "anvils, tongs and glowing iron": "a blacksmith",
        "tax returns, ledgers and balance sheets": "an accountant",
        "sick kittens, limping hounds and vaccines for calves": "a veterinarian",
    },
)
MUSIC = Kind(
    statements=(
        "{name} has practiced for years with {clue}.",
        "The neighbors complain when {name} sits down with {clue}.",
        "For the concert tonight, {name} brings along {clue}.",
    ),
    questions=("Who plays {topic}?", "Whose instrument is {topic}?", "Who could teach children {topic}?"),
    pairs={
        "eighty-eight keys and three pedals": "the piano",
        "a horsehair bow, rosin and a chin rest": "the violin",
        "drones, a chanter and tartan": "the bagpipes",
        "sticks, cymbals and a snare": "the drums",
        "a long slide and a bottle of slide oil": "the trombone",
        "a capo, six strings and a plectrum": "the guitar",
        "forty-seven strings and a gilded column": "the harp",
        "bellows, buttons and two leather straps": "the accordion",
    },
)
SPORTS = Kind(
    statements=(
        "{name} spends every free weekend with {clue}.",
        "In the garage of {name} there is no room left beside {clue}.",
        "{name} won a medal thanks to {clue}.",
    ),
    questions=("Whose hobby is {topic}?", "Who is good at {topic}?", "Who knows the rules of {topic}?"),
    pairs={
        "a puck, skates and a helmet with a cage": "ice hockey",
        "putters, tees and a caddie": "golf",
        "shuttlecocks and a light racket": "badminton",
        "a foil, a mesh mask and a white jacket": "fencing",
        "bishops, knights and a ticking clock": "chess",
        "a quiver, a longbow and straw targets": "archery",
        "oars, a coxswain and a narrow boat": "rowing",
        "chalk, crampons and a harness for steep cliffs": "mountaineering",
    },
)
KINDS = {"places": PLACES, "languages": LANGUAGES, "work": WORK, "music": MUSIC, "sports": SPORTS}
