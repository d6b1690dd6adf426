"""RULER's rule in reference mode, whole words in fixed mode."""

import random

from unspool.evals.suite import Question
from unspool.evals.suites.ruler.suite import match_all, match_any


def asked(mode: str, *references: str) -> Question:
    return Question(context="", question="", references=references, meta={"mode": mode})


def test_both_modes_on_parts_of_words() -> None:
    """The defect: RULER finds "no" in "not" and a number within a longer one."""
    for output, reference in (("I do not know.", "no"), ("12345678", "1234567"), ("partying", "party")):
        assert match_any(output, asked("reference", reference)) == 1
        assert match_any(output, asked("fixed", reference)) == 0
    for output, reference in (
        ("No.", "no"),
        ("it is 1234567.", "1234567"),
        ("$5 million!", "$5 million"),
        ("答えは42円", "42"),
    ):
        assert match_any(output, asked("fixed", reference)) == match_any(output, asked("reference", reference)) == 1


def test_all_is_a_share_and_any_is_one_of_them() -> None:
    for mode in ("fixed", "reference"):
        assert match_all("b A", asked(mode, "a", "b", "c", "d")) == 0.5
        assert match_any("b A", asked(mode, "x", "b", "c")) == 1
        assert match_any("", asked(mode, "x")) == match_all("", asked(mode, "x")) == 0


def test_control_characters_are_new_lines_as_in_ruler() -> None:
    for mode in ("fixed", "reference"):
        assert match_any("a\x00b", asked(mode, "a\nb")) == 1
        assert match_any("a\x00b", asked(mode, "ab")) == 0


def test_reference_mode_is_rulers_rule_on_random_outputs() -> None:
    """RULER's own two lines, written down here from its description."""
    rng = random.Random(0)
    for _ in range(1000):
        references = tuple("".join(rng.choices("aAbB1 ", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 4)))
        output = "".join(rng.choices("aAbB1 \n\t\x07é", k=rng.randint(0, 12)))
        cleaned = "".join("\n" if char < " " else char for char in output.strip()).strip().lower()
        found = [reference.lower() in cleaned for reference in references]

        question = asked("reference", *references)
        assert match_all(output, question) == sum(found) / len(found)
        assert match_any(output, question) == float(any(found))
