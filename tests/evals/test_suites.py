from unspool.cli.eval import TASK_SUITES
from unspool.evals.suites import SUITES


def test_every_suite_can_be_named_in_a_recipe_and_on_the_command_line():
    assert set(SUITES) == set(TASK_SUITES)
    assert {name: suite.name for name, suite in SUITES.items()} == {name: name for name in SUITES}
    assert all(suite.tasks for suite in SUITES.values())
    assert all(name == task.name for suite in SUITES.values() for name, task in suite.tasks.items())


def test_what_needs_a_judge_says_by_which_protocol():
    for suite in SUITES.values():
        assert {task.judge for task in suite.tasks.values()} <= {None, "qa", "summary"}
