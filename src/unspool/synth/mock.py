"""A generator that only pretends: replies made by rule from what it is asked.

Promise: a reply depends on the request and the faults asked for, on nothing else, so that a test can say what must
come out. Its good replies quote the text they are about; its faults are those that the checks are there for.
"""

import hashlib
import re
import time
from collections.abc import Mapping
from threading import Lock

from unspool.base.artefact import digest
from unspool.eval.backends.http import Passing
from unspool.synth.config import Fault
from unspool.synth.replies import Reply, Request

_PART = re.compile(r"<(part|summaries|text)>\n(.*)\n</\1>", re.DOTALL)
_SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?]|\n|$)")
_ASKS = (
    "What is told about {words}?",
    "What does one learn of {words}?",
    "Which statement is made concerning {words}?",
    "How does the account put the matter of {words}?",
    "What is said where {words} are mentioned?",
)
_COPY = (
    "Question: Who kept the great ledger of the northern harbour in those years, for what reason was it kept, and what "
    "became of it when the winter storms had broken the old sea wall and the keeper went away?\nAnswer: {words}"
)


class MockAnswering:
    def __init__(self, faults: Mapping[Fault, float], seconds: float) -> None:
        self._faults, self._seconds = dict(faults), seconds
        self._tried: set[str] = set()
        self._lock = Lock()

    @property
    def identity(self) -> str:
        # Errors and slowness change no reply.
        return digest(["mock", {name: share for name, share in self._faults.items() if name not in ("error", "slow")}])

    def reply(self, request: Request) -> Reply:
        draw = hashlib.sha256(request.prompt.encode()).digest()
        self._trouble(request.prompt, draw)
        if self._seconds:
            time.sleep(self._seconds)
        text = self._text(request.prompt, draw)
        return Reply(
            text=text, prompt_tokens=len(request.prompt) // 4, reply_tokens=len(text) // 4, seconds=self._seconds
        )

    def _trouble(self, prompt: str, draw: bytes) -> None:
        """Some requests fail at their first attempt."""
        with self._lock:
            is_first = prompt not in self._tried
            if is_first and (_share(draw, 0) < self._faults.get("error", 0.0)):
                self._tried.add(prompt)
                raise Passing("http_500", "it pretends to be broken")
        if is_first and _share(draw, 1) < self._faults.get("slow", 0.0):
            time.sleep(0.05)

    def _text(self, prompt: str, draw: bytes) -> str:
        found = _PART.search(prompt)
        if '{"supported"' in prompt:
            return 'It does. {"supported": 1}'
        part = found[2] if found else prompt
        fault = self._fault(draw)
        if fault == "garbage":
            return "As a large pretender I would rather tell you a story."
        if fault == "empty":
            return ""
        sentences = [one.strip() for one in _SENTENCE.findall(part) if len(one.split()) >= 4] or [part[:200].strip()]
        if "Summary: your summary" in prompt:
            step = max(1, len(sentences) // 6)
            return f"Summary: {' '.join(sentences[::step][:6])}"
        sentence = sentences[int.from_bytes(draw[4:8]) % len(sentences)]
        if fault == "copy":
            return _COPY.format(words=" ".join(sentence.split()[:4]))
        words = sorted(set(re.findall(r"[^\W\d_]{4,}", sentence)), key=lambda word: (len(word), word))[-3:] or ["it"]
        asked = _ASKS[draw[8] % len(_ASKS)].format(words=", ".join(words))
        if fault == "refers":
            return f"Reasoning: some.\nQuestion: In the snippet, {asked}\nAnswer: {sentence}"
        if fault == "unsupported":
            return f"Reasoning: some.\nQuestion: {asked}\nAnswer: Zanzibar exported 9417 porcelain elephants overnight."
        return f"Reasoning: this tells of {words[-1]}.\nQuestion: {asked}\nAnswer: {sentence}"

    def _fault(self, draw: bytes) -> str | None:
        """At most one, so that their shares are those asked for."""
        at = _share(draw, 2)
        names: tuple[Fault, ...] = ("garbage", "empty", "refers", "unsupported", "copy")
        for name in names:
            at -= self._faults.get(name, 0.0)
            if at < 0:
                return name
        return None


def _share(draw: bytes, number: int) -> float:
    """A number from 0 to 1 out of a hash."""
    return int.from_bytes(draw[16 + 4 * number : 20 + 4 * number]) / 2**32
