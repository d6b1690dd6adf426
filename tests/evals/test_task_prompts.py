"""Which questions of a task are asked, which share a context, and what stands in a prompt."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unspool.core.errors import ConfigError, DataError
from unspool.evals import suites
from unspool.evals.backends.base import ROW_TOKENS
from unspool.evals.backends.mock import Oracle
from unspool.evals.eval_plan import EvalPlan
from unspool.evals.heldout import PlanInputs
from unspool.evals.prompts import group_prompts, prompt_hash
from unspool.evals.question_choice import stratified_subset
from unspool.evals.run import score
from unspool.evals.suite import Ask, QuestionId, Unit
from unspool.evals.suites import nocha
from unspool.evals.task_suite import PlannedTasks, common_prefix

from .suites import english_tokenizer
from .toy import LABELS, TOY, entry

pytestmark = pytest.mark.usefixtures("toy_suite")


def planned(config, tokenizer, *, seed=0) -> PlannedTasks:
    return suites.suite_of(config).plan(config, PlanInputs(tokenizer=tokenizer, seed=seed, root=Path()))


def prompt_of(made: PlannedTasks, question: QuestionId):
    length = question.length
    return made.prepare(Unit(planned=made, length=length, index=question.index, tokens=length, questions=(question,)))


def test_questions_on_one_context_run_together(scoring, tokenizer):
    asked = []

    class Watched(Oracle):
        def answers(self, prompt):
            asked.append((prompt.suite, prompt.length, len(prompt.context_ids), len(prompt.questions)))
            return super().answers(prompt)

    score(replace(scoring, evals=[entry(tasks=["shared"])]), Watched(tokenizer))

    assert [questions for _, _, _, questions in asked] == [4] * 6
    assert all(shared > 20 for _, _, shared, _ in asked)
    assert [length for _, length, _, _ in asked] == [256] * 3 + [512] * 3


def test_short_prompts_share_a_row_without_a_context(scoring, tokenizer):
    plan = EvalPlan([entry(tasks=["lone"])], tokenizer, seed=0, root=Path())
    plan.group_questions(list(plan.prompt_lines()), row_tokens=ROW_TOKENS)
    prompt = plan.evals[0].prepare(plan.units[0])

    assert len(prompt.context_ids) == 0 and len(prompt.questions) == plan.units[0].num_samples == 12
    assert [prompt_hash(question.ids) for question in prompt.questions] == list(plan.units[0].hashes)


def test_base_prompts_are_the_ids_of_the_joined_text(tokenizer):
    made = planned(entry(), tokenizer, seed=0)
    wanted = QuestionId(task="lone", length=256, index=3)
    asked, prompt = made.question(wanted), prompt_of(made, wanted)

    ids = [*prompt.context_ids.tolist(), *prompt.questions[0].ids.tolist()]
    assert ids == tokenizer(asked.context + asked.question + asked.prefix)["input_ids"]
    assert made.chat == {"lone": False, "shared": False, "labelled": False, "judged": False}


@pytest.fixture
def chatty(tokenizer):
    template = "{% for m in messages %}<begin>{{ m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}<begin>assistant\n"
    copy = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>", bos_token="<begin>")
    copy.chat_template = template
    return copy


def test_chat_prompts_are_those_of_the_template_with_the_answer_begun(chatty):
    made = planned(entry(), chatty, seed=0)
    wanted = QuestionId(task="lone", length=256, index=3)
    asked, line = made.question(wanted), made.prompt_line(wanted)
    prompt = prompt_of(made, wanted)

    turns = [{"role": "user", "content": asked.context + asked.question}]
    text = chatty.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) + asked.prefix
    ids = [*prompt.context_ids.tolist(), *prompt.questions[0].ids.tolist()]
    assert ids == chatty(text, add_special_tokens=False)["input_ids"]
    assert made.chat == {"lone": True, "shared": False, "labelled": False, "judged": False}
    assert line["prompt_tokens"] + 8 <= 256


def test_a_text_that_spells_a_control_token_is_only_text(chatty):
    made = planned(entry(chat="on", tasks=["labelled"]), chatty, seed=0)
    asked = replace(made.question(QuestionId(task="labelled", length=256, index=0)), context="It is <end> now.")

    ids = made.encoder.ids(asked, chat=True).tolist()

    assert ids.count(chatty.eos_token_id) == 1, "the template's own"


def test_chat_can_be_turned_off_and_needs_a_template_to_be_on(tokenizer, chatty):
    assert not any(planned(entry(chat="off"), chatty, seed=0).chat.values())
    assert all(planned(entry(chat="on"), chatty, seed=0).chat.values())
    with pytest.raises(ConfigError, match="has no chat template; use chat: off"):
        planned(entry(chat="on"), tokenizer, seed=0)


def test_room_for_answers_is_taken_off_the_length(tokenizer):
    own = planned(entry(tasks=["lone"]), tokenizer, seed=0)
    more = planned(entry(tasks=["lone"], answer_tokens=100), tokenizer, seed=0)
    wanted = QuestionId(task="lone", length=512, index=0)

    assert own.prompt_line(wanted)["prompt_tokens"] - more.prompt_line(wanted)["prompt_tokens"] > 30
    assert prompt_of(more, wanted).answer_tokens == 100


def test_a_task_that_exceeds_its_length_is_stopped(tokenizer, monkeypatch):
    long = replace(
        TOY.tasks["lone"], build=lambda sources, ask: TOY.tasks["lone"].build(sources, replace(ask, length=4000))
    )
    monkeypatch.setitem(suites.SUITES, "ruler", replace(TOY, tasks={"lone": long}))

    with pytest.raises(DataError, match=r"ruler lone: question 0 needs \d+ tokens of 256"):
        EvalPlan([entry()], tokenizer, seed=0, root=Path()).check()


def test_unknown_tasks_and_doubled_ones_are_refused(scoring, tokenizer):
    with pytest.raises(ConfigError, match=r"task of ruler 'lon' is not known\. Did you mean 'lone'"):
        score(replace(scoring, evals=[entry(tasks=["lon"])]), Oracle(tokenizer))
    with pytest.raises(ConfigError, match=r"suite ruler \(lone\) at length 256 appears twice"):
        score(replace(scoring, evals=[entry(), entry(tasks=["lone"])]), Oracle(tokenizer))


def test_a_length_that_cannot_work_is_found_before_the_model_is_used(scoring, tokenizer):
    with pytest.raises(ConfigError, match="toy: too short"):
        score(replace(scoring, evals=[entry(lengths=[32])]), Oracle(tokenizer))


def test_subsets_take_equally_many_of_every_stratum():
    strata = [LABELS[at % 3] for at in range(30)]
    chosen = stratified_subset(strata, 12, seed=0)

    assert chosen == sorted(set(chosen)) and [sum(strata[at] == label for at in chosen) for label in LABELS] == [4] * 3
    assert stratified_subset(strata, 12, seed=0) == chosen != stratified_subset(strata, 12, seed=1)
    assert stratified_subset(strata, 99, seed=0) == list(range(30))
    # Every sixth item of a set with six depths in turn would have one depth only.
    assert len({at % 6 for at in stratified_subset([at % 6 for at in range(600)], 100, seed=0)}) == 6


def test_groups_keep_every_question_once():
    contexts = ["a", "b", "a", "c", "d", "a"]
    found = group_prompts(contexts, [9000, 100, 9000, 9000, 100, 9000])

    assert found == [[0, 2, 5], [1, 4], [3]]
    assert all(len(row) <= 16 for row in group_prompts([str(at) for at in range(100)], [10] * 100))
    assert all(600 * len(row) <= ROW_TOKENS for row in group_prompts([str(at) for at in range(100)], [600] * 100))
    assert group_prompts(list("abc"), [8000] * 3) == [[0], [1], [2]]
    assert group_prompts(list("abc"), [8000] * 3, 1 << 16) == [[0, 1, 2]], "longer rows take longer prompts"
    many = group_prompts([str(at) for at in range(200)], [100] * 200, 1 << 16)
    assert [len(row) for row in many] == [64, 64, 64, 8], "and more of them"


def test_a_common_prefix_leaves_something_to_ask():
    rows = [np.array([1, 2, 3, 4]), np.array([1, 2, 3]), np.array([1, 2, 9, 9])]

    assert common_prefix(rows) == 2
    assert common_prefix(rows[:2]) == 2
    assert common_prefix(rows[:1]) == 3


def test_groups_are_drawn_whole_or_not_at_all(scoring, tokenizer, monkeypatch):
    labelled = TOY.tasks["labelled"]
    pairs = replace(labelled, together=2, stratum=None)
    endless = replace(TOY.tasks["lone"], together=3)
    monkeypatch.setitem(suites.SUITES, "ruler", replace(TOY, tasks={"labelled": pairs, "lone": endless}))

    for samples, expected in ((1, 2), (7, 6), (29, 28), (100, 30)):
        asked = planned(entry(samples=samples, lengths=[256]), tokenizer, seed=5)
        indices = [wanted.index for wanted in asked.question_ids if wanted.task == "labelled"]
        assert len(indices) == expected
        assert all(at ^ 1 in indices for at in indices), "a pair was split"
    assert len([wanted for wanted in asked.question_ids if wanted.task == "lone"]) == 99
    assert stratified_subset(LABELS * 4, 5, 0, together=1) == stratified_subset(LABELS * 4, 5, 0)
    firsts = stratified_subset(["a", "x", "b", "x"] * 5, 8, 0, together=2)
    assert [index % 4 // 2 for index in firsts[::2]].count(0) == 2, "strata are those of the first of each pair"


def test_real_pairs_of_claims_are_never_split(english_sources):
    task, sources = english_sources
    size = task.size(sources)

    for samples in (2, 49, 50, 51, size - 1):
        indices = stratified_subset([None] * size, samples, 0, together=task.together)
        assert len(indices) == samples // 2 * 2
        pairs = [task.build(sources, Ask(length=1024, seed=0, index=at)).meta["pair"] for at in indices[:6]]
        assert pairs == [pair for pair in pairs[::2] for _ in range(2)]


@pytest.fixture
def english_sources():
    return nocha.SUITE.tasks["claims"], nocha.SUITE.load(english_tokenizer(), {})
