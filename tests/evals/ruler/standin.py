"""A small clone in RULER's public layout, with texts of our own."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from unspool.evals.benchmark_copy import hash_files
from unspool.evals.suites.ruler import ruler_clone
from unspool.evals.suites.ruler.haystacks import split_sentences

TEXTS = {
    "niah": ("Some {type_needle_v} are in it.\n{context}\nWhat are all {type_needle_v} of {query}?", " They are"),
    "variable_tracking": (
        "Follow the names.\n\n{context}\nQuestion: who has {query}?",
        " These {num_v}: ",
    ),
    "common_words_extraction": (
        "Now comes a list.\n{context}\nQuestion: which are common?",
        " The words are:",
    ),
    "freq_words_extraction": ("A text of code words. {context}\nQuestion: which occur most?", " The words are:"),
    "qa": ("Read these.\n\n{context}\n\nQuestion: {query}", " Answer:"),
}
NEEDLE, NOISE, DOCUMENT = (
    "The {type_needle_v} of {key}: {value}.",
    "Rain fell. It grew dark.",
    "Document {i}:\n{document}",
)


def write_clone(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the clone; its files become the known ones, and NLTK is our own splitter."""
    tasks = {
        name: {"tokens_to_generate": 16, "template": template, "answer_prefix": prefix}
        for name, (template, prefix) in TEXTS.items()
    }
    loop = f"if kind == 'essay':\n    haystack = load()\nelif kind == 'noise':\n    haystack = {NOISE!r}\n"
    people = [{"context": f"Person {at} likes tea number {at}.", "qas": qas(at)} for at in range(30)]
    documents = {
        ruler_clone.CONSTANTS: f"raise SystemExit('this file is not run')\nTASKS = {tasks!r}\n",
        ruler_clone.TASK_LIST: "niah_single_1:\n  task: niah\n",
        ruler_clone.METRICS: "TASKS = {}\n",
        f"{ruler_clone.SYNTHETIC}/niah.py": f"needle = {NEEDLE!r}\n{loop}",
        f"{ruler_clone.SYNTHETIC}/variable_tracking.py": loop,
        f"{ruler_clone.SYNTHETIC}/common_words_extraction.py": "",
        f"{ruler_clone.SYNTHETIC}/freq_words_extraction.py": "",
        f"{ruler_clone.SYNTHETIC}/qa.py": f"DOCUMENT_PROMPT = {DOCUMENT!r}\n",
        ruler_clone.ESSAYS: json.dumps({"text": " ".join(f"Sentence {at} is here." for at in range(3000))}),
        ruler_clone.WORDS: json.dumps({str(at): f"word{at}" for at in range(12_000)}),
        ruler_clone.SQUAD: json.dumps({"data": [{"title": "people", "paragraphs": people}]}),
        ruler_clone.HOTPOTQA: json.dumps([pair(at) for at in range(30)]),
    }
    for name, text in documents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    words = root / "wonderwords"
    words.mkdir()
    for kind, count in (("noun", 60), ("adjective", 20), ("verb", 9)):
        (words / f"{kind}list.txt").write_text("".join(f"{kind}{chr(97 + at % 26)}{at}\n" for at in range(count)))
    known = {name: (found,) for name, found in hash_files(root, documents).items()}
    known |= {name: (found,) for name, found in hash_files(words, ruler_clone.WORD_LISTS).items()}
    monkeypatch.setattr(ruler_clone, "KNOWN", known)
    essay = json.loads(documents[ruler_clone.ESSAYS])["text"].split()
    monkeypatch.setattr(ruler_clone, "KNOWN_ESSAYS", ruler_clone.essay_sketch(essay))
    monkeypatch.setitem(sys.modules, "nltk.tokenize", Splitter())
    return root


class Splitter:
    """Stands for the module nltk.tokenize."""

    def sent_tokenize(self, text: str) -> Sequence[str]:
        return split_sentences(text)


def qas(at: int) -> list[dict[str, object]]:
    return [{"question": f"What does {at} like?", "is_impossible": False, "answers": [{"text": f"tea number {at}"}]}]


def pair(at: int) -> dict[str, object]:
    context = [[f"Title {at + more}", [f"Text of {at + more}.", " It ends."]] for more in range(10)]
    return {"question": f"Which is {at}?", "answer": f"Text of {at}", "context": context, "supporting_facts": []}
