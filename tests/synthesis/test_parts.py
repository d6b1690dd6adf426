"""Where documents are cut, which wording is taken, and which conversation comes next."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from unspool.core.errors import ConfigError
from unspool.synthesis.config import SynthConfig
from unspool.synthesis.conversation import even_groups, summarize
from unspool.synthesis.documents import Visit, split_text, window_around
from unspool.synthesis.requests import Request
from unspool.synthesis.scheduler import Scheduler, num_summary_requests, surplus
from unspool.synthesis.templates import DEFAULT_REQUESTS, PLACEHOLDERS, TemplateUsage, fill, load_templates

from .toy import document


@pytest.mark.parametrize("size", [40, 300, 2000, 10**6])
def test_parts_lie_in_order_and_leave_out_only_space(size):
    text = document(np.random.default_rng(0), 60)
    spans = split_text(text, size)
    ends = [0, *(end for span in spans for end in span), len(text)]
    assert ends == sorted(ends)
    assert all(not text[stop:start].strip() for stop, start in zip(ends[::2], ends[1::2], strict=True))
    assert all(text[start:stop].strip() == text[start:stop] != "" for start, stop in spans)
    sizes = [stop - start for start, stop in spans]
    assert size >= len(text) or max(sizes) <= 1.5 * size
    if size == 300:
        assert all(text[stop - 1] == "." for _, stop in spans), "at the end of a sentence"


def test_text_without_a_space_is_cut_anywhere():
    assert split_text("x" * 100, 30) == [(0, 33), (33, 67), (67, 100)]


def test_a_stretch_holds_its_part_which_lies_anywhere_in_it():
    text = document(np.random.default_rng(1), 200)
    inner = split_text(text, 300)[10]
    starts = []
    for seed in range(200):
        start, stop = window_around(text, inner, 1500, np.random.default_rng(seed))
        assert start <= inner[0] < inner[1] <= stop
        assert stop - start <= 1500
        starts.append((inner[0] - start) / 1500)
    assert min(starts) < 0.15
    assert max(starts) > 0.6
    assert window_around(text, inner, len(text), np.random.default_rng(0)) == (0, len(text))


@pytest.mark.parametrize(("parts", "group", "expected"), [(1, 8, 1), (8, 8, 9), (9, 8, 12), (64, 8, 73), (5, 2, 11)])
def test_summaries_go_from_parts_to_groups_to_the_whole(parts, group, expected):
    asked: list[str] = []

    def ask(prompts: list[Request]) -> list[str]:
        asked.extend(prompt.prompt for prompt in prompts)
        return [f"Summary: {len(asked)}-{number}" for number in range(len(prompts))]

    found = summarize(
        [f"part {number}" for number in range(parts)], group, ask, templates=DEFAULT_REQUESTS, max_tokens=100
    )
    assert not isinstance(found, str)
    assert len(asked) == expected == num_summary_requests(parts, group)
    if parts > 1:
        assert "the entire text" in asked[-1]
        assert sum("the entire text" in prompt for prompt in asked) == 1


def test_a_reply_that_is_no_summary_ends_it():
    found = summarize(
        ["a", "b"], 2, lambda prompts: ["Answer: no"] * len(prompts), templates=DEFAULT_REQUESTS, max_tokens=100
    )
    assert found == "Answer: no"


def test_groups_are_even_and_in_order():
    groups = even_groups([str(number) for number in range(9)], 8)
    assert [len(group) for group in groups] == [4, 5]
    assert [one for group in groups for one in group] == [str(number) for number in range(9)]


def test_there_are_a_dozen_wordings_of_everything_and_all_have_their_places():
    lists = load_templates(None).lists
    assert {kind: set(names) for kind, names in lists.items()} == {
        kind: set(names) for kind, names in PLACEHOLDERS.items()
    }
    for kind, names in lists.items():
        for name, texts in names.items():
            assert len(set(texts)) == len(texts) >= 12, (kind, name)
    placed = [text.index("{question}") < text.index("{document}") for text in lists["qa"]["placement"]]
    assert 4 <= sum(placed) <= len(placed) - 4, "before and after"
    assert any(text.count("{question}") == 2 for text in lists["qa"]["placement"])


def test_filled_text_is_not_read_as_a_template():
    assert fill("{document} {question}", document="{question}", question="q") == "{question} q"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("qa: {placement: ['{document}']}", "lacks the placeholder {question}"),
        ("qa: {answer: ['{answer} {name}']}", "unknown placeholder {name}; allowed: {answer}"),
        ("qa: {answers: ['{answer}']}", "did you mean 'answer'?"),
        ("sumary: {}", "did you mean 'summary'?"),
        ("qa: {answer: []}", "non-empty list"),
        ("[1", "cannot be read as YAML"),
        ("3", "must be a mapping"),
    ],
)
def test_wording_of_the_users_is_checked(text, said, tmp_path):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError) as told:
        load_templates(tmp_path / "own.yaml")
    assert said in str(told.value)


def test_the_least_used_wording_is_next_also_after_rejections():
    templates = load_templates(None)
    uses = TemplateUsage(templates, seed=0)
    counts: Counter[int] = Counter()
    for number in range(60):
        chosen = uses.choose("qa", number)
        if number % 3 == 0:
            uses.release("qa", chosen)
        else:
            counts[chosen["answer"]] += 1
    assert len(counts) == len(templates.lists["qa"]["answer"])
    assert max(counts.values()) - min(counts.values()) <= 1


class Documents:
    """Only what a scheduler looks at."""

    def __init__(self, lens: np.ndarray) -> None:
        self.lens = lens

    def num_visits(self, purpose: str) -> int:
        return len(self.lens)

    def visit(self, purpose: str, number: int) -> Visit:
        return Visit(number, 0)


def config(**more: object) -> SynthConfig:
    base = {"from": "x", "generator": {"kind": "mock", "reply_tokens": 100}, "chunk": 100, "min_tokens": 200}
    return SynthConfig.model_validate({**base, "length": 20000, "ahead": 16, **more})


@pytest.mark.parametrize("shares", [{"qa": 0.4, "rag": 0.3, "summary": 0.3}, {"rag": 1, "summary": 3}, {"qa": 1}])
@pytest.mark.parametrize("tokens", [None, 3_000_000])
def test_shares_are_realized_for_any_lengths_and_rejections(shares, tokens):
    rng = np.random.default_rng(0)
    documents = Documents(rng.integers(1000, 20000, size=900))
    scheduler = Scheduler(config(shares=shares, tokens=tokens), documents, load_templates(None), seed=0)  # type: ignore[arg-type]
    in_flight, lines = [], []
    while True:
        while len(in_flight) < 16 and (job := scheduler.next_job()):
            in_flight.append(job)
        if not in_flight:
            break
        job = in_flight.pop(0)
        size = min(job.max_tokens, int(documents.lens[job.visit.document] * (0.5 if job.kind == "rag" else 1)))
        kept = rng.random() < (0.4 if job.kind == "summary" else 0.9)
        if kept and not scheduler.accepts(job.kind, size):
            scheduler.close(job.kind)
            kept = False
        known = SimpleNamespace(visit=job.visit) if job.kind == "qa" else None
        scheduler.finish(job, size if kept else None, known)  # type: ignore[arg-type]
        lines.append({"n": job.number, "kind": job.kind, "kept": kept, "tokens": size})
    dropped = surplus(lines, config(shares=shares, tokens=tokens))
    left = Counter[str]()
    for line in lines:
        left[line["kind"]] += line["tokens"] if line["kept"] and line["n"] not in dropped else 0
    whole = sum(left.values())
    parts = config(shares=shares).token_shares
    assert {kind: left[kind] / whole for kind in parts} == pytest.approx(parts, abs=0.01)
    if tokens and shares != {"rag": 1, "summary": 3}:
        assert whole == pytest.approx(tokens, rel=0.01)


def test_shares_are_left_alone_where_too_much_would_be_given_up():
    lines = [{"n": number, "kind": "qa", "kept": True, "tokens": 100} for number in range(20)]
    lines += [{"n": 20, "kind": "summary", "kept": True, "tokens": 100}]
    assert surplus(lines, config(shares={"qa": 1, "summary": 1})) == set()
    assert surplus(lines[:3] * 0 + lines[-3:], config(shares={"qa": 1, "summary": 1})) == set()
