"""Build one conversation about a document, or return the reason for its rejection."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from unspool.core.rng import rng_for
from unspool.data.sources.base import Message
from unspool.data.sources.files import Unreadable, checked_text
from unspool.data.tokenize.chat import ChatEncoder, build_chat_encoder
from unspool.evals.judge.protocols import parse
from unspool.synthesis.config import SynthConfig
from unspool.synthesis.decontamination import NgramIndex
from unspool.synthesis.documents import Documents, Span, cut_before, split_text, window_around
from unspool.synthesis.quality import pair_reason, summary_reason
from unspool.synthesis.requests import GeneratorClient, Request, RequestFailedError
from unspool.synthesis.scheduler import Job
from unspool.synthesis.templates import (
    Pair,
    RequestTemplates,
    Templates,
    parse_answer,
    parse_pair,
    parse_question,
    parse_summary,
    support_prompt,
)

# Import only for type checking, because the import takes seconds.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPARE_TOKENS = 16  # joined texts may have a few more tokens than their parts
NUM_CACHED_DOCUMENTS = 64  # RAG uses a document again some time after its question
FIT_ATTEMPTS = 6
Parsed = TypeVar("Parsed")
SUMMARY_QUESTION = "What does the whole text tell, in short?"


class TokenCounter:
    """Counts tokens of a conversation like packing. Without a chat template, counts only the messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str | None, *, name: str) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        has_template = template is not None or bool(tokenizer.chat_template)
        self.encoder: ChatEncoder | None = (
            build_chat_encoder(tokenizer, template, source=name) if has_template else None
        )

    @property
    def digest(self) -> str | None:
        return self.encoder.template.digest if self.encoder else None

    def count(self, messages: Sequence[Message]) -> int:
        """Count tokens. Raises Unreadable if the chat template cannot render the messages."""
        for message in messages:
            checked_text(message.content)
        if self.encoder is not None:
            return len(self.encoder.encode(messages).tokens)
        return sum(len(self._tokenizer.encode(message.content, add_special_tokens=False).ids) for message in messages)


@dataclass(frozen=True, kw_only=True)
class Summary:
    text: str
    basis: str  # text that the last request summarized


def summarize(
    parts: list[str],
    group: int,
    send: Callable[[list[Request]], list[str]],
    *,
    templates: RequestTemplates,
    max_tokens: int,
) -> Summary | str:
    """Summarize parts of a text, then join groups of summaries until one is left. Stops at an unparsable reply."""
    level = _parse_summaries(send(templates.summaries(parts, max_tokens)))
    basis = parts[0]
    while not isinstance(level, str) and len(level) > 1:
        groups = even_groups(level, group)
        basis = "\n\n".join(groups[0])
        level = _parse_summaries(send([templates.join(one, max_tokens, is_whole=len(groups) == 1) for one in groups]))
    return level if isinstance(level, str) else Summary(text=level[0], basis=basis)


def even_groups(texts: list[str], max_size: int) -> list[list[str]]:
    """Split texts into as few consecutive groups as possible, of about equal size."""
    count = -(-len(texts) // max_size)
    cuts = [round(number * len(texts) / count) for number in range(count + 1)]
    return [texts[start:stop] for start, stop in pairwise(cuts)]


def _parse_summaries(replies: list[str]) -> list[str] | str:
    """The parsed summaries, or the first reply without a summary."""
    found: list[str] = []
    for reply in replies:
        summary = parse_summary(reply)
        if summary is None:
            return reply
        found.append(summary)
    return found


class RejectedError(Exception):
    """A text is rejected. The reason is a key of REJECT_REASONS."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A conversation, or without messages the reason for its rejection or failure."""

    messages: tuple[Message, ...] = ()
    tokens: int = 0
    pair: Pair | None = None  # for a summary: without a question
    reason: str | None = None
    detail: str = ""
    is_failure: bool = False
    requests: tuple[str, ...] = ()
    shown: dict[str, Any] = field(default_factory=dict)  # shown spans of the document, in characters


@dataclass(frozen=True, kw_only=True)
class SynthInputs:
    """All inputs of a set of conversations."""

    config: SynthConfig
    documents: Documents
    templates: Templates
    generator: GeneratorClient
    judge: GeneratorClient | None
    counter: TokenCounter
    evaluations: NgramIndex
    seed: int


@dataclass(frozen=True, kw_only=True)
class _Document:
    text: str
    chars_per_token: float
    parts: list[Span]  # each question is about one part
    sha256: str
    is_clean: bool  # shares no n-gram with an evaluation

    def num_chars(self, tokens: float) -> int:
        return max(1, int(tokens * self.chars_per_token))


# Argument: number of characters. Returns the text to show and its spans.
_Show = Callable[[int], tuple[str, dict[str, Any]]]


class ConversationBuilder:
    """Builds conversations of at most `job.max_tokens` tokens; thread-safe.

    Results depend only on the job, its document and the replies.
    """

    def __init__(self, inputs: SynthInputs) -> None:
        self._inputs, self._config, self._templates = inputs, inputs.config, inputs.templates.requests
        self._reply_tokens = inputs.config.generator.reply_tokens
        self._cache: OrderedDict[int, _Document] = OrderedDict()
        self._lock = Lock()

    def build(self, job: Job) -> Outcome:
        requests: list[str] = list(job.reused.requests) if job.reused else []
        try:
            document = self._document(job.visit.document)
            if job.kind == "summary":
                return self._summary(job, document, requests)
            # Use another part at every visit, until all are used.
            order = rng_for(self._inputs.seed, "synth part", job.visit.document).permutation(len(document.parts))
            part = document.parts[int(order[job.visit.time % len(order)])]
            pair = job.reused.pair if job.reused else self._pair(document.text[slice(*part)], requests)
            show = self._show_window if job.kind == "qa" else self._show_passages
            return self._fit(job, document, pair, show(job, document, part), requests)
        except RejectedError as error:
            return Outcome(reason=error.reason, detail=error.detail, requests=tuple(requests))
        except RequestFailedError as error:
            return Outcome(reason=str(error), is_failure=True, requests=tuple(requests))
        except Unreadable as error:
            return Outcome(reason="unreadable", detail=error.detail, requests=tuple(requests))

    def _document(self, number: int) -> _Document:
        with self._lock:
            if number not in self._cache:
                self._cache[number] = self._read(number)
            self._cache.move_to_end(number)
            if len(self._cache) > NUM_CACHED_DOCUMENTS:
                self._cache.popitem(last=False)
            document = self._cache[number]
        if not document.text.strip():
            raise RejectedError("unreadable", "the document has no text")
        if not document.is_clean:
            raise RejectedError("contaminated_document")
        return document

    def _read(self, number: int) -> _Document:
        text = self._inputs.documents.text(number)
        chars_per_token = max(1, len(text)) / int(self._inputs.documents.lens[number])
        return _Document(
            text=text,
            chars_per_token=chars_per_token,
            parts=split_text(text, max(1, int(self._config.chunk * chars_per_token))),
            sha256=hashlib.sha256(text.encode()).hexdigest(),
            is_clean=not self._inputs.evaluations.overlaps(text),
        )

    def _pair(self, part: str, requests: list[str]) -> Pair:
        """Generate and check a question about a part, with its answer."""
        if self._templates.in_two_steps:
            question = self._ask(self._templates.question(part, self._reply_tokens), parse_question, requests)
            answer = self._ask(self._templates.answer(part, question, self._reply_tokens), parse_answer, requests)
            pair = Pair(question, answer)
        else:
            pair = self._ask(self._templates.pair(part, self._reply_tokens), parse_pair, requests)
        reason = pair_reason(pair, part, self._config.checks)
        if reason is not None:
            raise RejectedError(reason, f"{pair.question} | {pair.answer}"[:400])
        if self._inputs.evaluations.overlaps(f"{pair.question}\n{pair.answer}"):
            raise RejectedError("contaminated", pair.question[:400])
        self._judge(part, pair, requests)
        return pair

    def _judge(self, text: str, pair: Pair, requests: list[str]) -> None:
        if self._inputs.judge is None or self._config.judge is None:
            return
        request = Request(prompt=support_prompt(text, pair), max_tokens=self._config.judge.reply_tokens)
        requests.append(request.key(self._inputs.judge.identity))
        (reply,) = self._inputs.judge.send(request)
        verdict = parse(reply.text, {"supported": (0, 1)})
        if verdict is None:
            raise RejectedError("judge_unparsable", reply.text[:200])
        if not verdict["supported"]:
            raise RejectedError("judged_unsupported", f"{pair.question} | {pair.answer}"[:400])

    def _show_window(self, job: Job, document: _Document, part: Span) -> _Show:
        """Show a window of the document around the part."""
        seed = int(rng_for(self._inputs.seed, "synth place", job.number).integers(2**31))

        def show(chars: int) -> tuple[str, dict[str, Any]]:
            # Use the same draw at every size, so that shortening does not move the window.
            span = window_around(document.text, part, chars, np.random.default_rng(seed))
            return document.text[slice(*span)], {"part": part, "shown": span}

        return show

    def _show_passages(self, job: Job, document: _Document, part: Span) -> _Show:
        """Show the part among other parts of its document, shuffled."""
        order = rng_for(self._inputs.seed, "synth place", job.number).permutation(len(document.parts)).tolist()
        others = [document.parts[at] for at in order if document.parts[at] != part]

        def show(chars: int) -> tuple[str, dict[str, Any]]:
            size = part[1] - part[0]
            taken = [part]
            for span in others[: self._config.passages - 1]:
                size += span[1] - span[0]
                if size > chars:
                    break
                taken.append(span)
            if len(taken) < 2:
                raise RejectedError("does_not_fit")
            rng = rng_for(self._inputs.seed, "synth passages", job.number, len(taken))
            passages = [taken[at] for at in rng.permutation(len(taken)).tolist()]
            texts = [
                self._fill(job, "passage", number=str(number), text=document.text[slice(*span)])
                for number, span in enumerate(passages, start=1)
            ]
            return "\n\n".join(texts), {"part": part, "passages": passages}

        return show

    def _summary(self, job: Job, document: _Document, requests: list[str]) -> Outcome:
        start, stop = self._stretch(job, document)
        stretch = document.text[start:stop]
        parts = [stretch[slice(*span)] for span in split_text(stretch, document.num_chars(self._config.summary_chunk))]
        found = summarize(
            parts,
            self._config.summary_group,
            lambda some: self._send(some, requests),
            templates=self._templates,
            max_tokens=self._reply_tokens,
        )
        if isinstance(found, str):
            raise RejectedError("unparsable", found[:200])
        reason = summary_reason(found.text, stretch, self._config.checks)
        if reason is not None:
            raise RejectedError(reason, found.text[:400])
        if self._inputs.evaluations.overlaps(found.text):
            raise RejectedError("contaminated", found.text[:400])
        self._judge(found.basis, Pair(SUMMARY_QUESTION, found.text), requests)
        spans = {"shown": (start, stop), "parts": len(parts)}
        return self._fit(job, document, Pair("", found.text), lambda chars: (stretch, spans), requests)

    def _stretch(self, job: Job, document: _Document) -> Span:
        """Span to summarize: the whole document, or another span at every visit."""
        text = document.text
        count = int(self._inputs.documents.num_stretches[job.visit.document])
        at = len(text) * job.visit.time // count
        start = cut_before(text, at, slack=len(text) // count // 20) if at else 0
        # Before any request is sent, the span must fit together with the longest possible summary.
        max_tokens = job.max_tokens - self._reply_tokens - SPARE_TOKENS
        chars = document.num_chars(max_tokens - self._count(job, "…", Pair("", "…")))
        for _ in range(FIT_ATTEMPTS):
            stop = cut_before(text, min(len(text), start + chars), slack=chars // 5)
            tokens = self._count(job, text[start:stop], Pair("", "…"))
            if tokens <= max_tokens:
                return start, stop
            chars = int((stop - start) * max_tokens / tokens * 0.98)
        raise RejectedError("does_not_fit")

    def _fit(self, job: Job, document: _Document, pair: Pair, show: _Show, requests: list[str]) -> Outcome:
        """Build the conversation with as much of the document as fits."""
        overhead = self._count(job, "…", Pair(pair.question, pair.answer or "…"))
        chars = document.num_chars(job.max_tokens - overhead - SPARE_TOKENS)
        for _ in range(FIT_ATTEMPTS):
            text, spans = show(chars)
            messages = self._messages(job, text, pair)
            tokens = self._inputs.counter.count(messages)
            if tokens <= job.max_tokens:
                shown = {**spans, "characters": len(document.text), "sha256": document.sha256}
                return Outcome(messages=messages, tokens=tokens, pair=pair, requests=tuple(requests), shown=shown)
            chars = int(min(chars, len(text)) * job.max_tokens / tokens * 0.98)
        raise RejectedError("does_not_fit")

    def _count(self, job: Job, text: str, pair: Pair) -> int:
        return self._inputs.counter.count(self._messages(job, text, pair))

    def _messages(self, job: Job, text: str, pair: Pair) -> tuple[Message, ...]:
        instruction = self._fill(job, "instruction")
        question = self._fill(job, "placement", instruction=instruction, document=text, question=pair.question)
        answer = self._fill(job, "answer", answer=pair.answer)
        return (Message("user", question), Message("assistant", answer.strip()))

    def _fill(self, job: Job, name: str, **values: str) -> str:
        return self._inputs.templates.fill(job.kind, name, job.choice, **values)

    def _ask(self, request: Request, parse: Callable[[str], Parsed | None], requests: list[str]) -> Parsed:
        (reply,) = self._send([request], requests)
        parsed = parse(reply)
        if parsed is None:
            raise RejectedError("unparsable", reply[:200])
        return parsed

    def _send(self, batch: list[Request], requests: list[str]) -> list[str]:
        requests += [request.key(self._inputs.generator.identity) for request in batch]
        replies = self._inputs.generator.send(*batch)
        for reply in replies:
            if reply.is_cut:
                raise RejectedError("cut_short", reply.text[:200])
        return [reply.text for reply in replies]
