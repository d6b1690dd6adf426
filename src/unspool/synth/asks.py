"""What a generator is asked: in our words, or in the user's.

In: the part `ask` of a file of wording. Out: requests.
Promise: without a file, the prompts of prompts.py. Text of documents cannot be read as a template.
A strong model writes question and answer in one reply, in a form; a weak one does not keep to forms. So a file may ask
for the question and then, in a second request, for its answer, and may put the first words of a reply into its mouth.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from unspool.base.errors import ConfigError
from unspool.synth.places import check_name, check_places, fill
from unspool.synth.prompts import chunk_summary_prompt, join_summary_prompt, pair_prompt
from unspool.synth.replies import Request

ASK = "ask"
# For every request: the places its text must have, and those it may have besides.
PLACES: dict[str, tuple[set[str], set[str]]] = {
    "pair": ({"part"}, set()),
    "question": ({"part"}, set()),
    "answer": ({"part", "question"}, set()),
    "summary": ({"part"}, {"number", "count"}),
    "join": ({"summaries"}, set()),
}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request in words."""

    text: str
    begin: tuple[str, ...] = ()  # a reply's first words, which the model goes on from; one of them
    tokens: int | None = None  # of the longest reply, where it may be shorter than the generator's

    def request(self, longest: int, **parts: str) -> Request:
        prompt = fill(self.text, **parts)
        # By the text's own hash, so that the same request always begins in the same way.
        begin = self.begin[int.from_bytes(sha256(prompt.encode()).digest()[:8]) % len(self.begin)] if self.begin else ""
        return Request(prompt=prompt, max_tokens=min(longest, self.tokens or longest), begin=begin)


class Asks:
    """All requests; `longest` is the most tokens that a reply may have."""

    def __init__(self, own: Mapping[str, Ask]) -> None:
        self._own = own

    @property
    def plain(self) -> dict[str, dict[str, Any]]:
        """The user's texts; nothing where all are ours."""
        return {name: asdict(ask) for name, ask in sorted(self._own.items())}

    @property
    def in_two_steps(self) -> bool:
        return "question" in self._own

    def pair(self, part: str, longest: int) -> Request:
        own = self._own.get("pair")
        return own.request(longest, part=part) if own else Request(prompt=pair_prompt(part), max_tokens=longest)

    def question(self, part: str, longest: int) -> Request:
        return self._own["question"].request(longest, part=part)

    def answer(self, part: str, question: str, longest: int) -> Request:
        return self._own["answer"].request(longest, part=part, question=question)

    def summaries(self, parts: list[str], longest: int) -> list[Request]:
        """One request for each of the parts that a document is cut into."""
        own, count = self._own.get("summary"), len(parts)
        if own:
            return [own.request(longest, part=part, number=str(at), count=str(count)) for at, part in _numbered(parts)]
        return [
            Request(prompt=chunk_summary_prompt(part, at, count), max_tokens=longest) for at, part in _numbered(parts)
        ]

    def join(self, summaries: list[str], longest: int, *, is_whole: bool) -> Request:
        own = self._own.get("join")
        if own:
            return own.request(longest, summaries="\n\n".join(summaries))
        return Request(prompt=join_summary_prompt(summaries, is_whole=is_whole), max_tokens=longest)


def _numbered(parts: list[str]) -> Iterator[tuple[int, str]]:
    return enumerate(parts, start=1)


OURS = Asks({})


def load_asks(where: str, given: Any) -> Asks:
    """The user's requests, checked."""
    if not isinstance(given, dict):
        raise ConfigError(f"{where} must be a mapping with some of {', '.join(PLACES)}.")
    own = {}
    for name, value in given.items():
        check_name(where, "request", name, PLACES)
        own[name] = _ask(f"{where}.{name}", value)
        check_places(f"{where}.{name}", own[name].text, *PLACES[name])
    if ("question" in own) != ("answer" in own):
        raise ConfigError(f"{where} must have both question and answer, which are asked one after the other, or none.")
    if "question" in own and "pair" in own:
        raise ConfigError(f"{where} has pair, which asks for both at once, beside question and answer; leave one out.")
    return Asks(own)


def _ask(where: str, value: Any) -> Ask:
    fields = value if isinstance(value, dict) else {"text": value}
    for name in fields:
        check_name(where, "key", name, {"text": "", "begin": "", "tokens": ""})
    text, begin, tokens = fields.get("text"), fields.get("begin", []), fields.get("tokens")
    begins = [begin] if isinstance(begin, str) else begin
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where} must be a text, or a mapping of text, begin and tokens.")
    if not isinstance(begins, list) or not all(isinstance(one, str) and one.strip() for one in begins):
        raise ConfigError(f"{where}.begin must be a reply's first words, or a list of such.")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        raise ConfigError(f"{where}.tokens must be a whole number of at least 1: the longest reply.")
    return Ask(text=text, begin=tuple(begins), tokens=tokens)
