import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from unspool.data.sources.synthetic import states
from unspool.data.sources.synthetic.draft import LABEL, NAME
from unspool.data.sources.synthetic.fit_documents import TASKS

from . import solvers
from .factory import document
from .solvers import SOLVERS, check
from .solvers.reading import read_parts, read_question

ANSWERS = 10_000


def documents(task: str, answers: int, long: dict[int, int]) -> Iterator[tuple[str, int]]:
    """So many documents of each long length, then short ones until there are enough answers; some with prose."""
    for tokens, count in long.items():
        for index in range(count):
            text = document(task, tokens, index, with_prose=index % 2 == 1)
            answers -= (held := len(read_parts(text).answers))
            yield text, held
    index = 0
    while answers > 0:
        text = document(task, 1024, index, with_prose=index % 3 == 2)
        answers -= (held := len(read_parts(text).answers))
        index += 1
        yield text, held


# One document of 128K, two of 32K and eight of 8K hold some hundred answers; the rest comes from documents of 1K.
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("answers", [2000, pytest.param(ANSWERS, marks=pytest.mark.slow)])
def test_the_solver_agrees_with_thousands_of_answers(task, answers):
    solved = 0
    for text, held in documents(task, answers, {1 << 17: 1, 1 << 15: 2, 1 << 13: 8}):
        assert check(task, text) is None, text[:500]
        solved += held
    assert solved >= answers


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_solver_agrees_with_ten_thousand_answers_in_long_documents(task):
    solved = 0
    for text, held in documents(task, 0, {1 << 17: 60, 1 << 16: 60, 1 << 15: 100, 1 << 14: 150}):
        assert check(task, text) is None, text[:500]
        solved += held
    assert solved >= ANSWERS


def with_answer(text: str, number: int, answer: str) -> str:
    """The text with another answer to one of its questions."""
    parts = read_parts(text)
    at = len(parts.context)
    for question, stated in list(zip(parts.questions, parts.answers, strict=True))[: number + 1]:
        at = text.index(question, at) + len(question)
        at = text.index(": ", at) + 2
        end = at + len(stated)
    return text[:at] + answer + text[end:]


def wrong(answer: str, others: list[str]) -> set[str]:
    """Many ways to be wrong."""
    listed = answer.split(", ")
    changed = {
        "", " " + answer, answer + " ", answer + ".", answer[:-1], answer + answer[-1], answer.upper(), answer[::-1],
        ", ".join(listed[1:]), ", ".join(listed[::-1]), ", ".join([*listed, listed[0]]), "none", "yes", "no", "0",
        *others,
    }  # fmt: skip
    if answer.lstrip("-").isdigit():
        changed |= {str(int(answer) + 1), str(int(answer) - 1), str(-int(answer)), "0" + answer}
    return changed - {answer}


@pytest.mark.parametrize("task", TASKS)
def test_every_corrupted_answer_is_caught(task):
    tried = 0
    for index in range(6):
        text = document(task, 1024, index)
        answers = read_parts(text).answers
        assert check(task, with_answer(text, len(answers) - 1, answers[-1])) is None
        for number, answer in enumerate(answers):
            for changed in wrong(answer, answers):
                assert check(task, with_answer(text, number, changed)) is not None, (answer, changed)
                tried += 1
    assert tried > 250


@pytest.mark.parametrize("task", TASKS)
def test_a_missing_fact_is_detected(task):
    tried = 0
    for index in range(30):
        text = document(task, 1024, index, with_prose=index % 2 == 1)
        for solution in SOLVERS[task](text):
            for place in solution.places[:4]:
                end = text.index("\n", place) + 1
                assert check(task, text[:place] + text[end:]) is not None, text[place:end]
                tried += 1
    assert tried > 100


@pytest.mark.parametrize("task", TASKS)
def test_a_changed_fact_is_detected(task):
    """In every decisive fact there is a word or a number, or a list, that, changed, makes the stated answer wrong."""
    tried = 0
    for index in range(15):
        text = document(task, 1024, index)
        for solution in SOLVERS[task](text):
            for place in solution.places[:2]:
                line = text[place : text.index("\n", place)]
                changed = [
                    line[: word.start()] + other_word(word[0]) + line[word.end() :]
                    for word in re.finditer(r"[A-Za-z]+|[0-9]+", line)
                ]
                # Whoever has one of two marks may have both.
                changed.append(re.sub(r"[a-z]+(?=[,.)]|$)", lambda word: other_word(word[0]), line))
                after = text[place + len(line) :]
                assert any(check(task, text[:place] + one + after) is not None for one in changed), line
                tried += 1
    assert tried > 50


def other_word(word: str) -> str:
    return str(int(word) + 1) if word.isdigit() else word[:-1] + ("H" if word[-1].isupper() else "q")


@pytest.mark.parametrize("task", TASKS)
def test_facts_that_decide_answers_are_spread_over_the_whole_document(task):
    depths: list[float] = []
    for index in range(150):
        text = document(task, 2048, index)
        size = len(read_parts(text).context)
        for solution in SOLVERS[task](text):
            if len(solution.places) <= 8:  # not those that ask for everything
                depths += [place / size for place in solution.places]
    counts, _ = np.histogram(depths, bins=10, range=(0, 1))
    assert len(depths) > 500
    assert counts.min() > 0.6 * counts.mean()
    assert counts.max() < 1.5 * counts.mean()


def test_the_last_change_of_the_thing_in_question_may_be_anywhere():
    depths: list[float] = []
    for index in range(300):
        text = document("states", 2048, index)
        parts = read_parts(text)
        for question, solution in zip(parts.questions, SOLVERS["states"](text), strict=True):
            if asks_for_the_end(question):
                depths.append(solution.places[0] / len(parts.context))
    counts, _ = np.histogram(depths, bins=5, range=(0, 1))
    assert len(depths) > 500
    assert counts.min() > 0.6 * counts.mean()
    assert counts.max() < 1.5 * counts.mean()


def asks_for_the_end(question: str) -> bool:
    final = [*states.COUNTER_FINAL, *(wording for theme in states.MOVES.values() for wording in theme.final)]
    return read_question(question, final, thing=f"{NAME}|{LABEL}") is not None


@pytest.mark.parametrize("task", TASKS)
def test_no_answer_is_right_most_of_the_time(task):
    said: Counter[str] = Counter()
    for index in range(200):
        said.update(read_parts(document(task, 1024, index)).answers)
    assert said.most_common(1)[0][1] < 0.25 * said.total()
    if task == "attributes":
        assert 0.8 < said["yes"] / said["no"] < 1.25


AMBIGUOUS = {
    "sorting": "- 14\n- 14\n- 20\n\nQuestion: Sorted by value, smallest first, what is entry number 1?\nAnswer: 14",
    "hops": "Ann Lee reports to Bob Ray.\nAnn Lee reports to Cid May.\n\nQuestion: Who stands 1 levels above Ann Lee?\n"
    "Answer: Bob Ray",
    "states": "Step 1: The oak-elm door is now open.\nStep 1: The oak-elm door is now closed.\n\n"
    "Question: How is the oak-elm door left?\nAnswer: open",
    "similar": "Entry 1000: AAAAAAAAAA\nEntry 1001: AAAAAAAABB\n\n"
    "Question: Which entry differs from AAAAAAAAAB in the fewest letters?\nAnswer: 1000",
    "attributes": "oak-elm: red, blue\noak-elm: green\n\nQuestion: Does oak-elm have red?\nAnswer: yes",
}


@pytest.mark.parametrize("task", TASKS)
def test_a_question_with_two_right_answers_is_refused(task):
    assert "cannot be solved" in str(check(task, AMBIGUOUS[task]))


def test_solutions_by_hand():
    text = (
        "A log.\nStep 1: oak-elm is set to 5.\nStep 2: Add 3 to oak-elm.\nSome prose between the facts.\n"
        "Step 3: oak-elm becomes 40.\nStep 4: Take 2 from oak-elm.\n\n"
        "Q: What is the value of oak-elm at the end?\nA: 38\n"
        "Q: What is the value of oak-elm after step 2?\nA: 8\n"
        "Q: How many steps change oak-elm?\nA: 4"
    )
    assert [solution.answer for solution in SOLVERS["states"](text)] == ["38", "8", "4"]
    assert check("states", text) is None
    assert str(check("states", text[:-1] + "5")).startswith("'How many steps change oak-elm?' is answered '5'")


@pytest.mark.parametrize("damage", ["no question", "unknown question", "no answer", "line between"])
def test_a_text_that_is_not_read_whole_is_refused(damage):
    text = document("hops", 1024, 0)
    first = len(read_parts(text).context)
    damaged = {
        "no question": text[:first],
        "unknown question": text + f"\n{read_label(text, 0)}Who are you?\n{read_label(text, 1)}me",
        "no answer": text[: text.rindex("\n")],
        "line between": text + "\nand more",
    }[damage]
    assert check("hops", damaged) is not None


def read_label(text: str, number: int) -> str:
    lines = [line for line in text[len(read_parts(text).context) :].split("\n") if line]
    return lines[number].split(": ")[0] + ": "


def test_solvers_take_nothing_but_wording_from_the_generators():
    folder = Path(solvers.__file__).parent
    for name in ("sorting", "hops", "states", "similarity", "attributes"):
        tree = ast.parse((folder / f"{name}.py").read_text())
        taken = [
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == f"unspool.data.sources.synthetic.{name}"
            for alias in node.names
        ]
        assert taken
        assert all(one.isupper() or one == "Theme" for one in taken), taken


@pytest.mark.parametrize("task", TASKS)
def test_wordings_vary(task):
    openings, questions = set(), set()
    for index in range(300):
        text = document(task, 1024, index)
        openings.add(text.split("\n")[0])
        # Without what is filled in, a question is its wording.
        questions |= {
            re.sub(r"\d+|\S*[-_]\S*|\"[^\"]*\"|\([^)]*\)", "", said)[:25] for said in read_parts(text).questions
        }
    assert len(openings) >= 6
    assert len(questions) >= 6
