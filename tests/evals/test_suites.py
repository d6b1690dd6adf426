from unspool.evals.config import eval_adapter
from unspool.evals.suites import SUITES, suite_of


def test_every_suite_can_be_named_in_a_recipe_and_on_the_command_line():
    for name, suite in SUITES.items():
        lengths = {"lengths": [256], "length": 256}
        entry = {key: value for key, value in lengths.items() if key in suite.config.model_fields}
        found = eval_adapter().validate_python({"suite": name, **entry})
        assert suite.name == name and isinstance(found, suite.config) and suite_of(found) is suite
    assert all(name == task.name for suite in SUITES.values() for name, task in suite.tasks.items())


def test_what_needs_a_judge_says_by_which_protocol():
    for suite in SUITES.values():
        assert {task.judge for task in suite.tasks.values()} <= {None, "qa", "summary"}
