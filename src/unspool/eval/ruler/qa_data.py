"""SQuAD and HotpotQA, in the forms in which people have them.

In: a path, or hub:ORG/NAME. Out: `Questions`: documents, and questions that say which of them hold the answer.
Forms: JSON as released; JSON lines or Parquet with the Hub's fields; JSON lines with `answers` as a list (SQuAD) or
with `gold` documents (HotpotQA), beside which a pool gives further ones.
Promise: documents are sorted and each stands once, questions keep the order of the file, as in RULER.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.base.errors import DataError
from unspool.eval.ruler.qa_files import records

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Query:
    question: str
    answers: tuple[str, ...]
    golds: tuple[int, ...]  # numbers of documents
    context: tuple[int, ...]  # those that RULER always shows, gold among them
    more: tuple[int, ...] = ()  # those of the same article


@dataclass(frozen=True)
class Questions:
    documents: list[str]
    queries: list[Query]
    origin: str  # "generated", or the name of the file


@dataclass(frozen=True)
class Raw:
    """One question with its documents as text."""

    question: str
    answers: Sequence[str]
    golds: Sequence[str]
    context: Sequence[str]
    article: str = ""


def read_squad(path: str) -> Questions:
    raw: list[Raw] = []
    for number, record in enumerate(records(path, default_split="validation"), 1):
        try:
            raw += _released_squad(record) if "paragraphs" in record else [_squad_row(record)]
        except (KeyError, TypeError, AttributeError) as error:
            raise _not_as_expected("SQuAD", path, number, "context, question, answers", error) from error
    return collected(raw, Path(path).name)


def read_hotpotqa(path: str, pool: str | None = None) -> Questions:
    raw: list[Raw] = []
    for number, record in enumerate(records(path, default_split="validation"), 1):
        try:
            raw.append(_hotpot_row(record))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise _not_as_expected("HotpotQA", path, number, "question, answer, context or gold", error) from error
    extra: list[str] = []
    for number, record in enumerate(records(pool, default_split="train") if pool else (), 1):
        try:
            extra.append(titled(record["title"], record["text"]))
        except (KeyError, TypeError) as error:
            raise _not_as_expected("HotpotQA pool", str(pool), number, "title, text", error) from error
    return collected(raw, Path(path).name, extra)


def collected(raw: Sequence[Raw], origin: str, extra: Iterable[str] = ()) -> Questions:
    """Documents by number; questions without an answer are left out."""
    answerable = [one for one in raw if any(one.answers)]
    if not answerable:
        raise DataError(f"ruler: {origin} holds no question with an answer.")
    found = {*extra, *(text for one in raw for text in one.context)}
    documents = sorted(found)
    number = {text: at for at, text in enumerate(documents)}
    articles: dict[str, dict[int, None]] = {}
    for one in raw:
        articles.setdefault(one.article, {}).update(dict.fromkeys(number[text] for text in one.context))
    queries = []
    for one in answerable:
        context = tuple(number[text] for text in one.context)
        more = tuple(at for at in articles[one.article] if at not in context) if one.article else ()
        golds = tuple(number[text] for text in one.golds)
        answers = tuple(answer for answer in one.answers if answer)
        queries.append(Query(question=one.question, answers=answers, golds=golds, context=context, more=more))
    return Questions(documents, queries, origin)


def titled(title: str, text: str) -> str:
    return f"{title}\n{text}"


def _released_squad(article: Record) -> list[Raw]:
    found = []
    for at, paragraph in enumerate(article["paragraphs"]):
        text = paragraph["context"]
        # A paragraph without questions is a document all the same.
        found += [Raw("", (), (), (text,), article["title"])] if not paragraph["qas"] else []
        for asked in paragraph["qas"]:
            answers = [] if asked.get("is_impossible") else [answer["text"] for answer in asked["answers"]]
            found.append(Raw(asked["question"], answers, (text,), (text,), article["title"] or f"article {at}"))
    return found


def _squad_row(record: Record) -> Raw:
    answers = record["answers"]
    texts = answers["text"] if isinstance(answers, Mapping) else answers
    text = record["context"]
    return Raw(record["question"], list(texts), (text,), (text,), record.get("title") or "")


def _hotpot_row(record: Record) -> Raw:
    if "gold" in record:
        golds = [titled(gold["title"], gold["text"]) for gold in record["gold"]]
        return Raw(record["question"], [record["answer"]], golds, golds)
    context = record["context"]
    if isinstance(context, str):
        context = json.loads(context)
    pairs = list(zip(context["title"], context["sentences"], strict=True)) if isinstance(context, Mapping) else context
    texts = {title: titled(title, "".join(sentences)) for title, sentences in pairs}
    facts = record.get("supporting_facts") or []
    names = facts["title"] if isinstance(facts, Mapping) else [fact[0] for fact in facts]
    golds = [texts[name] for name in dict.fromkeys(names) if name in texts]
    shown = list(texts.values())
    return Raw(record["question"], [record["answer"]], golds or shown, shown)


def _not_as_expected(kind: str, path: str, number: int, fields: str, error: Exception) -> DataError:
    return DataError(
        f"ruler: {path}, record {number}, is no {kind} record ({type(error).__name__}: {error}); "
        f"it should have {fields}, as the released files or the Hub's data set do."
    )
