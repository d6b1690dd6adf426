"""Errors of the API name its arguments; the command line shows its options instead."""

from pathlib import Path

import pytest

import unspool
from unspool.core.errors import ConfigError


@pytest.mark.parametrize(
    ("call", "arguments", "options", "option"),
    [
        (
            lambda: unspool.evaluate("asset:tiny-base", "niah", rope=unspool.YaRN(), context="long"),
            "`context` 'long': write a size",
            ("eval", "asset:tiny-base", "--suite", "niah", "--rope", "yarn", "--context", "long"),
            "--context 'long': write a size",
        ),
        (
            lambda: unspool.evaluate("asset:tiny-base", budget="soon"),
            "`budget` 'soon' is not a duration",
            ("eval", "asset:tiny-base", "--budget", "soon"),
            "--budget 'soon' is not a duration",
        ),
        (
            lambda: unspool.evaluate("asset:tiny-base", beyond_context="ask"),
            "`beyond_context` needs `suite` or `lengths`;",
            ("eval", "asset:tiny-base", "--beyond-context", "ask"),
            "--beyond-context needs --suite or --lengths;",
        ),
        (
            lambda: unspool.generate("asset:tiny-base", "text", rope=unspool.YaRN()),
            '`rope` needs the context length to reach, such as `context="32K"`.',
            ("generate", "asset:tiny-base", "--question", "text", "--rope", "yarn"),
            "--rope needs the context length to reach, such as --context 32K.",
        ),
        (
            lambda: unspool.generate("asset:tiny-base", "a " * 999),
            "drop the middle of the text with `beyond_context='truncate'`,",
            ("generate", "asset:tiny-base", "--question", "a " * 999),
            "drop the middle of the text with --beyond-context truncate,",
        ),
        (
            lambda: unspool.plan("tiny", gpu="cpu", count=2),
            "`gpu='cpu'` plans for one process on this CPU; leave `count` out.",
            ("plan", "tiny", "--gpu", "cpu", "--count", "2"),
            "--gpu cpu plans for one process on this CPU; leave --count out.",
        ),
        (
            lambda: unspool.plan("tiny", {"stages.0.lr": "much"}),
            """`overrides='stages.0.lr="much"'`: stages.0.lr""",
            ("plan", "tiny", "--set", 'stages.0.lr="much"'),
            "--set 'stages.0.lr=\"much\"': stages.0.lr",
        ),
        (
            lambda: unspool.launch("tiny", host="a b"),
            "`host='a b'` is not a host name",
            ("launch", "tiny", "--host", "a b"),
            "--host 'a b' is not a host name",
        ),
        (
            lambda: unspool.study("tiny", only=["utkk"]),
            "`only='utkk'`: no arm is called",
            ("study", "tiny", "--only", "utkk"),
            "--only utkk: no arm is called",
        ),
        (
            lambda: unspool.inspect_attention("asset:tiny-base", "README.md", by="size"),
            "`by='size'`: use far, same or share",
            ("inspect", "attention", "asset:tiny-base", "--text", "README.md", "--by", "size"),
            "--by size: use far, same or share",
        ),
    ],
)
def test_an_error_names_arguments_in_python_and_options_on_the_command_line(call, arguments, options, option):
    from typer.testing import CliRunner

    from unspool.cli.main import build_app

    with pytest.raises(ConfigError) as caught:
        call()
    assert arguments in str(caught.value) and "--" not in str(caught.value)
    done = CliRunner().invoke(build_app(), list(options))
    assert done.exit_code == 2, done.output
    assert option in done.stderr and "`" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("`context` is for `rope`", "--context is for --rope"),
        ('use `rope="yarn", context=LENGTH`.', "use --rope yarn --context LENGTH."),
        ("`lengths=['2K', 8192]`", "--lengths 2K,8192"),
        ("`measured=True` needs a GPU", "--measure needs a GPU"),
        ("`text='two words'`", "--text 'two words'"),
        ("give `model`", "give MODEL"),
        ("`synth` and `hf auth login` and `rope, other` stay", "`synth` and `hf auth login` and `rope, other` stay"),
        ("`rope=f(` and `x.y` stay", "`rope=f(` and `x.y` stay"),
    ],
)
def test_options_take_the_place_of_arguments_that_the_command_has(message, shown):
    from unspool.cli.option_names import with_options

    names = {name: f"--{name}" for name in ("rope", "context", "lengths", "text")}
    assert with_options(message, names | {"measured": "--measure", "model": "MODEL"}) == shown


def test_no_message_of_a_function_names_an_option_of_the_command():
    """Whole commands, such as `unspool eval MODEL --rope yarn`, stay."""
    import ast

    own = {"--set", "--only", "--out", "--suite", "--lengths", "--rope", "--context", "--backend", "--url", "--gpu"}
    source = Path(unspool.__file__).parent
    found = []
    for path in source.rglob("*.py"):
        if path.relative_to(source).parts[0] in ("cli", "assets"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                texts = [str(each.value) for each in ast.walk(node.exc) if isinstance(each, ast.Constant)]
                words = {word.strip("`'(),.;:") for text in texts if "unspool " not in text for word in text.split()}
                found += [(path.name, node.lineno, word) for word in words & own]
    assert found == []
