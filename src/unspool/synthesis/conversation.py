"""One conversation: from a document to what is trained on, or to the reason why there is none.

In: a `Job`. Out: an `Outcome`. Runs in threads; depends on the job, the document and the replies alone.
Promise: an example has at most `job.room` tokens; the part that a question is about is always in it, anywhere in the
document's stretch that is shown.
Elsewhere: recursive summaries (summaries.py), which job (schedule.py), copies and sums (run.py).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.core.rng import rng_for
from unspool.data.sources.base import Message
from unspool.data.sources.files import Unreadable, checked_text
from unspool.data.tokenize.chat import ChatEncoder, build_chat_encoder
from unspool.evals.judge.protocols import parse
from unspool.synthesis.config import SynthConfig
from unspool.synthesis.decontamination import Evaluations
from unspool.synthesis.documents import Documents, Span, Turn, around, cut_before, tile
from unspool.synthesis.generator_prompts import (
    Asks,
    Pair,
    read_answer,
    read_pair,
    read_question,
    read_summary,
    support_prompt,
)
from unspool.synthesis.kind_balance import Job
from unspool.synthesis.quality import pair_reason, summary_reason
from unspool.synthesis.requests import Asking, Failed, Request
from unspool.synthesis.templates import Templates

# How many tokens a conversation has, as the rows of a stage will count them.


# Only to name the type: importing it takes seconds.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Measure:
    """With a chat template exactly; without one the tokens of the messages alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str | None, *, name: str) -> None:
        self._plain = tokenizer.backend_tokenizer
        has_template = template is not None or bool(tokenizer.chat_template)
        self.encoder: ChatEncoder | None = (
            build_chat_encoder(tokenizer, template, source=name) if has_template else None
        )

    @property
    def digest(self) -> str | None:
        return self.encoder.template.digest if self.encoder else None

    def tokens(self, messages: Sequence[Message]) -> int:
        """Unreadable where the conversation cannot be written out."""
        for message in messages:
            checked_text(message.content)
        if self.encoder is not None:
            return len(self.encoder.encode(messages).tokens)
        return sum(len(self._plain.encode(message.content, add_special_tokens=False).ids) for message in messages)


# Recursive summaries: of the parts of a text, of groups of those summaries, and so on to one of the whole.


AskAll = Callable[[list[Request]], list[str]]


@dataclass(frozen=True, kw_only=True)
class Summary:
    text: str
    basis: str  # what the last request showed


def summarize(parts: list[str], group: int, ask: AskAll, *, asks: Asks, longest: int) -> Summary | str:
    """`longest` is the most tokens that a reply may have."""
    level = _read(ask(asks.summaries(parts, longest)))
    if isinstance(level, str):
        return level
    basis = parts[0]
    while len(level) > 1:
        groups = even_groups(level, group)
        basis = "\n\n".join(groups[0])
        level = _read(ask([asks.join(one, longest, is_whole=len(groups) == 1) for one in groups]))
        if isinstance(level, str):
            return level
    return Summary(text=level[0], basis=basis)


def even_groups(texts: list[str], most: int) -> list[list[str]]:
    """Consecutive texts in as few groups of at most `most` as possible, of about equal size."""
    count = -(-len(texts) // most)
    cuts = [round(number * len(texts) / count) for number in range(count + 1)]
    return [texts[start:stop] for start, stop in pairwise(cuts)]


def num_requests(parts: int, group: int) -> int:
    """How many requests a text of so many parts takes."""
    total = level = parts
    while level > 1:
        level = -(-level // group)
        total += level
    return total


def _read(replies: list[str]) -> list[str] | str:
    """The summaries; the first reply that is none."""
    found: list[str] = []
    for reply in replies:
        summary = read_summary(reply)
        if summary is None:
            return reply
        found.append(summary)
    return found


# Tokens kept free: joining texts may give a few more than their parts have.
SPARE = 16
# Documents that stay read: RAG comes back to one some time after its question.
KEPT_OPEN = 64
# A stretch that turned out too long is shortened so often before it is given up.
TRIES = 6
SUMMARY_QUESTION = "What does the whole text tell, in short?"


class Refused(Exception):  # noqa: N818
    """What was asked for is not kept; its reason is one of checks.REASONS."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Kept if it has messages; else refused or failed, with the reason."""

    messages: tuple[Message, ...] = ()
    tokens: int = 0
    pair: Pair | None = None  # of a summary: an empty question
    reason: str | None = None
    detail: str = ""
    is_failure: bool = False
    requests: tuple[str, ...] = ()
    shown: dict[str, Any] = field(default_factory=dict)  # spans of the document, in characters


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What conversations are made with."""

    config: SynthConfig
    documents: Documents
    templates: Templates
    asking: Asking
    judge: Asking | None
    measure: Measure
    evaluations: Evaluations
    seed: int


@dataclass(frozen=True, kw_only=True)
class _Text:
    """A document, read and cut."""

    text: str
    per_token: float  # characters
    spans: list[Span]  # the parts that are asked about
    sha256: str
    is_clean: bool  # it shares nothing with an evaluation

    def chars(self, tokens: float) -> int:
        return max(1, int(tokens * self.per_token))


class Maker:
    def __init__(self, tools: Tools) -> None:
        self._tools, self._config, self._asks = tools, tools.config, tools.templates.asks
        self._longest = tools.config.generator.reply_tokens
        self._texts: OrderedDict[int, _Text] = OrderedDict()
        self._lock = Lock()

    def make(self, job: Job) -> Outcome:
        requests: list[str] = list(job.known.requests) if job.known else []
        try:
            return self._make(job, requests)
        except Refused as refused:
            return Outcome(reason=refused.reason, detail=refused.detail, requests=tuple(requests))
        except Failed as failed:
            return Outcome(reason=str(failed), is_failure=True, requests=tuple(requests))
        except Unreadable as error:
            return Outcome(reason="unreadable", detail=error.detail, requests=tuple(requests))

    def _make(self, job: Job, requests: list[str]) -> Outcome:
        document = self._read(job.turn)
        if job.kind == "summary":
            return self._summary(job, document, requests)
        inner = self._part(document.spans, job.turn)
        pair = job.known.pair if job.known else self._pair(document.text[slice(*inner)], requests)
        if job.kind == "qa":
            return self._qa(job, document, inner, pair, requests)
        return self._rag(job, document, inner, pair, requests)

    def _read(self, turn: Turn) -> _Text:
        with self._lock:
            if turn.document not in self._texts:
                self._texts[turn.document] = self._opened(turn.document)
            self._texts.move_to_end(turn.document)
            if len(self._texts) > KEPT_OPEN:
                self._texts.popitem(last=False)
            document = self._texts[turn.document]
        if not document.text.strip():
            raise Refused("unreadable", "the document holds no text")
        if not document.is_clean:
            raise Refused("contaminated_document")
        return document

    def _opened(self, number: int) -> _Text:
        text = self._tools.documents.text(number)
        per_token = max(1, len(text)) / int(self._tools.documents.lens[number])
        return _Text(
            text=text,
            per_token=per_token,
            spans=tile(text, max(1, int(self._config.chunk * per_token))),
            sha256=hashlib.sha256(text.encode()).hexdigest(),
            is_clean=not self._tools.evaluations.holds_part_of(text),
        )

    def _part(self, spans: list[Span], turn: Turn) -> Span:
        """Another part each time a document comes up, until all have been."""
        order = rng_for(self._tools.seed, "synth part", turn.document).permutation(len(spans))
        return spans[int(order[turn.time % len(spans)])]

    def _pair(self, part: str, requests: list[str]) -> Pair:
        pair = self._two_steps(part, requests) if self._asks.in_two_steps else self._one_step(part, requests)
        reason = pair_reason(pair, part, self._config.checks)
        if reason is not None:
            raise Refused(reason, f"{pair.question} | {pair.answer}"[:400])
        if self._tools.evaluations.holds_part_of(f"{pair.question}\n{pair.answer}"):
            raise Refused("contaminated", pair.question[:400])
        self._judge(part, pair, requests)
        return pair

    def _one_step(self, part: str, requests: list[str]) -> Pair:
        reply = self._ask(self._asks.pair(part, self._longest), requests)
        pair = read_pair(reply)
        if pair is None:
            raise Refused("unparsable", reply[:200])
        return pair

    def _two_steps(self, part: str, requests: list[str]) -> Pair:
        reply = self._ask(self._asks.question(part, self._longest), requests)
        question = read_question(reply)
        if question is None:
            raise Refused("unparsable", reply[:200])
        reply = self._ask(self._asks.answer(part, question, self._longest), requests)
        answer = read_answer(reply)
        if answer is None:
            raise Refused("unparsable", reply[:200])
        return Pair(question, answer)

    def _judge(self, part: str, pair: Pair, requests: list[str]) -> None:
        if self._tools.judge is None:
            return
        request = Request(prompt=support_prompt(part, pair), max_tokens=self._judge_tokens)
        requests.append(request.key(self._tools.judge.identity))
        (reply,) = self._tools.judge.ask(request)
        said = parse(reply.text, {"supported": (0, 1)})
        if said is None:
            raise Refused("judge_unparsable", reply.text[:200])
        if not said["supported"]:
            raise Refused("judged_unsupported", f"{pair.question} | {pair.answer}"[:400])

    @property
    def _judge_tokens(self) -> int:
        assert self._config.judge is not None
        return self._config.judge.reply_tokens

    def _qa(self, job: Job, document: _Text, inner: Span, pair: Pair, requests: list[str]) -> Outcome:
        rng = self._rng(job)
        seed_of_place = int(rng.integers(2**31))

        def shown(chars: int) -> tuple[str, dict[str, Any]]:
            # The same chance at every size, so that shortening does not move the stretch about.
            span = around(document.text, inner, chars, np.random.default_rng(seed_of_place))
            return document.text[slice(*span)], {"part": inner, "shown": span}

        return self._fitted(job, document, pair, shown, requests)

    def _rag(self, job: Job, document: _Text, inner: Span, pair: Pair, requests: list[str]) -> Outcome:
        order = self._rng(job).permutation(len(document.spans)).tolist()
        others = [document.spans[at] for at in order if document.spans[at] != inner]

        def shown(chars: int) -> tuple[str, dict[str, Any]]:
            size = inner[1] - inner[0]
            taken = [inner]
            for span in others[: self._config.passages - 1]:
                size += span[1] - span[0]
                if size > chars:
                    break
                taken.append(span)
            if len(taken) < 2:
                raise Refused("does_not_fit")
            order = rng_for(self._tools.seed, "synth passages", job.number, len(taken)).permutation(len(taken))
            passages = [taken[at] for at in order.tolist()]
            texts = [
                self._fill(job, "passage", number=str(at), text=document.text[slice(*span)])
                for at, span in enumerate(passages, start=1)
            ]
            return "\n\n".join(texts), {"part": inner, "passages": passages}

        return self._fitted(job, document, pair, shown, requests)

    def _summary(self, job: Job, document: _Text, requests: list[str]) -> Outcome:
        start, stop = self._stretch(job, document)
        stretch = document.text[start:stop]
        parts = [stretch[slice(*span)] for span in tile(stretch, document.chars(self._config.summary_chunk))]
        group, longest = self._config.summary_group, self._longest
        found = summarize(parts, group, lambda some: self._ask_all(some, requests), asks=self._asks, longest=longest)
        if isinstance(found, str):
            raise Refused("unparsable", found[:200])
        summary, basis = found.text, found.basis
        reason = summary_reason(summary, stretch, self._config.checks)
        if reason is not None:
            raise Refused(reason, summary[:400])
        if self._tools.evaluations.holds_part_of(summary):
            raise Refused("contaminated", summary[:400])
        pair = Pair("", summary)
        self._judge(basis, Pair(SUMMARY_QUESTION, summary), requests)

        def shown(chars: int) -> tuple[str, dict[str, Any]]:
            return stretch, {"shown": (start, stop), "parts": len(parts)}

        return self._fitted(job, document, pair, shown, requests)

    def _stretch(self, job: Job, document: _Text) -> Span:
        """What of a document is summarised: all of it, or another stretch each time it comes up."""
        text = document.text
        count = int(self._tools.documents.stretches[job.turn.document])
        at = len(text) * job.turn.time // count
        start = cut_before(text, at, slack=len(text) // count // 20) if at else 0
        # It must fit before anything is asked about it, with room for the longest summary.
        room = job.room - self._longest - SPARE
        chars = document.chars(room - self._overhead(job, Pair("", "")))
        for _ in range(TRIES):
            stop = cut_before(text, min(len(text), start + chars), slack=chars // 5)
            tokens = self._tools.measure.tokens(self._messages(job, text[start:stop], Pair("", "…")))
            if tokens <= room:
                return start, stop
            chars = int((stop - start) * room / tokens * 0.98)
        raise Refused("does_not_fit")

    def _fitted(
        self,
        job: Job,
        document: _Text,
        pair: Pair,
        shown: Callable[[int], tuple[str, dict[str, Any]]],
        requests: list[str],
    ) -> Outcome:
        """The conversation with as much of the document as fits."""
        chars = document.chars(job.room - self._overhead(job, pair) - SPARE)
        for _ in range(TRIES):
            text, spans = shown(chars)
            messages = self._messages(job, text, pair)
            tokens = self._tools.measure.tokens(messages)
            if tokens <= job.room:
                about = {**spans, "characters": len(document.text), "sha256": document.sha256}
                return Outcome(messages=messages, tokens=tokens, pair=pair, requests=tuple(requests), shown=about)
            chars = int(min(chars, len(text)) * job.room / tokens * 0.98)
        raise Refused("does_not_fit")

    def _messages(self, job: Job, text: str, pair: Pair) -> tuple[Message, ...]:
        instruction = self._fill(job, "instruction")
        asked = self._fill(job, "placement", instruction=instruction, document=text, question=pair.question)
        answer = self._fill(job, "answer", answer=pair.answer)
        return (Message("user", asked), Message("assistant", answer.strip()))

    def _overhead(self, job: Job, pair: Pair) -> int:
        return self._tools.measure.tokens(self._messages(job, "…", Pair(pair.question, pair.answer or "…")))

    def _fill(self, job: Job, name: str, **parts: str) -> str:
        return self._tools.templates.fill(job.kind, name, job.chosen, **parts)

    def _rng(self, job: Job) -> np.random.Generator:
        return rng_for(self._tools.seed, "synth place", job.number)

    def _ask(self, request: Request, requests: list[str]) -> str:
        return self._ask_all([request], requests)[0]

    def _ask_all(self, asked: list[Request], requests: list[str]) -> list[str]:
        requests += [request.key(self._tools.asking.identity) for request in asked]
        replies = self._tools.asking.ask(*asked)
        if any(reply.is_cut for reply in replies):
            raise Refused("cut_short", next(reply.text for reply in replies if reply.is_cut)[:200])
        return [reply.text for reply in replies]
