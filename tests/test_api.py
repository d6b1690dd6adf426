"""The front door: `import unspool` is light, every public name works as its example says, and types are exported."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import unspool
from unspool.core.errors import ConfigError, DataError
from unspool.data.packing.row import IGNORE

README = Path(__file__).parents[1] / "README.md"
TEXTS = ["The sea was calm and the ship went on, as it had for days. " * count for count in (3, 9, 30, 1, 12, 40)]
# Examples that start processes or read the demo's books.
SLOW = ("export", "run", "verify")
HEAVY = ("torch", "transformers", "numpy", "pyarrow", "pydantic", "rich", "datatrove")


@pytest.fixture(scope="module")
def loaded():
    return unspool.load("asset:tiny-base", device="cpu")


def test_the_import_loads_nothing_heavy_and_takes_a_fraction_of_half_a_second():
    code = f"""
        import sys, time
        began = time.perf_counter()
        import unspool
        seconds = time.perf_counter() - began
        assert "load" in dir(unspool) and unspool.__version__
        assert not {set(HEAVY)} & set(sys.modules), sorted(sys.modules)
        print(seconds)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5


def test_no_module_takes_the_place_of_a_public_name():
    modules = {module.name for module in pkgutil.iter_modules(unspool.__path__)}
    assert "models" in modules and not modules & set(unspool.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'unspool' has no attribute 'lode'"):
        unspool.lode  # noqa: B018


def examples(name):
    """The doctests of a public name and of its methods."""
    thing = getattr(unspool, name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(thing, name, globs={"np": np}) if test.examples]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in unspool.__all__]
)
def test_every_public_name_has_an_example_that_runs(name):
    thing = getattr(unspool, name)
    assert thing.__name__ == name, "the class or function is called as it is imported"
    found = examples(name)
    assert any(test.name == name for test in found), f"{name} has no example in its docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_the_stub_is_the_table_of_names():
    stub = Path(unspool.__file__).with_suffix(".pyi").read_text()
    assert stub.count("    from ") == len(unspool.__all__) > 20
    assert (Path(unspool.__file__).parent / "py.typed").is_file()


def readme_example():
    """The Python example of the README, as printed."""
    _, found = README.read_text(encoding="utf-8").split("```python\n", 1)
    return found.split("```", 1)[0]


@pytest.mark.slow
def test_the_example_of_the_readme_runs_as_printed(tmp_path, monkeypatch, capsys):
    code = readme_example()
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith("import ")]
    assert len(lines) == 10
    monkeypatch.chdir(tmp_path)

    exec(compile(code, "README.md", "exec"), {})

    assert "niah" in capsys.readouterr().out
    assert (tmp_path / "my-model-2k" / "config.json").is_file()


# Packing


def test_packed_rows_are_as_a_recipe_makes_them(loaded, tmp_path):
    _, tokenizer = loaded
    dataset = unspool.pack(TEXTS, tokenizer, seq_len=128, packing="best_fit", out=tmp_path / "rows")

    assert len(dataset) == dataset.stats()["rows"] and all(len(row.tokens) == 128 for row in dataset)
    again = unspool.PackedDataset(tmp_path / "rows")
    assert np.array_equal(again[-1].tokens, dataset[len(dataset) - 1].tokens)
    text = tokenizer.decode(np.concatenate([row.tokens for row in dataset]))
    assert text.count("The sea was calm") == sum(each.count("The sea was calm") for each in TEXTS)


def test_texts_token_ids_records_and_conversations_can_be_packed(loaded):
    _, tokenizer = loaded
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in TEXTS]
    plain = unspool.pack(TEXTS, tokenizer, seq_len=128)
    for same in (ids, [{"text": text} for text in TEXTS], [{"input_ids": each} for each in ids]):
        other = unspool.pack(same, tokenizer, seq_len=128)
        assert [row.tokens.tolist() for row in other] == [row.tokens.tolist() for row in plain]
    assert (
        unspool.pack([{"body": text} for text in TEXTS], tokenizer, seq_len=128, text="body").stats() == plain.stats()
    )

    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    chatty = unspool.load("asset:tiny-base", device="cpu")[1]
    chatty.chat_template = turns
    talk = [{"role": "user", "content": "Which sea?"}, {"role": "assistant", "content": "The calm one."}]
    rows = unspool.pack([talk] * 20, chatty, seq_len=64, packing="best_fit")
    trained = rows.columns(0)["labels"]
    words = chatty.decode(trained[trained != IGNORE])
    assert "The calm one." in words and "Which sea" not in words


def test_sources_are_mixed_by_shares(loaded):
    _, tokenizer = loaded
    parts = {"sea": TEXTS * 4, "land": ["The land was dry. " * 60] * 24}
    dataset = unspool.pack(parts, tokenizer, seq_len=256, shares={"sea": 0.5, "land": 0.5})
    assert abs(dataset.stats()["shares"]["sea"]["realized"] - 0.5) < 0.1
    with pytest.raises(ConfigError, match="data has the parts sea, land; give shares"):
        unspool.pack(parts, tokenizer, seq_len=256)


def test_columns_are_labels_that_stock_code_shifts_itself(loaded):
    _, tokenizer = loaded
    dataset = unspool.pack(TEXTS, tokenizer, seq_len=128)
    columns = dataset.columns(0)
    ids, labels = columns["input_ids"], columns["labels"]
    starts = np.cumsum(columns["seq_lengths"]) - columns["seq_lengths"]
    assert (labels[starts] == IGNORE).all() and (columns["position_ids"][starts] == 0).all()
    rest = np.setdiff1d(np.arange(128), starts)
    assert np.array_equal(labels[rest], ids[rest])


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ("one text", {}, ConfigError, "names no files; give files, or a list of texts"),
        ([], {}, DataError, "it contains no text"),
        (["text", None], {}, DataError, "record 1: expected a text, a list of token ids or a conversation"),
        ([{"body": "text"}], {}, DataError, "record 0: no field 'text', 'input_ids' or 'messages'; it has 'body'"),
        ([[1, 2, 99_999]], {}, DataError, "record 0: token 99999 is outside the tokenizer's"),
        (["\0"], {}, DataError, "record 0: a NUL character"),
        (["few"], {}, DataError, "tokens do not fill one row of 128"),
        (TEXTS, {"seq_len": "12Q"}, ConfigError, "seq_len unit 'Q' is not known"),
        (TEXTS, {"packing": "bestfit"}, ConfigError, "packing Input should be 'concat', "),
        (TEXTS, {"strategy": [unspool.UtK(), unspool.CIP()]}, ConfigError, "utk and cip both move chunks"),
        (TEXTS, {"shares": {"a": 1.0}}, ConfigError, "give data as a dict"),
    ],
)
def test_mistakes_in_packing_are_one_sentence_and_leave_nothing(loaded, tmp_path, data, options, error, message):
    with pytest.raises(error, match=message):
        unspool.pack(data, loaded[1], **{"seq_len": 128, "out": tmp_path / "rows", **options})
    assert not (tmp_path / "rows").exists()


def test_a_folder_with_other_files_is_not_replaced(loaded, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds no packed rows"):
        unspool.pack(TEXTS, loaded[1], seq_len=128, out=tmp_path)
    assert (tmp_path / "thesis.tex").is_file()


# Models


def test_a_model_in_memory_is_evaluated_as_its_folder_and_left_as_it_was():
    model, _ = unspool.load("asset:tiny-base", device="cpu")
    model.train()
    settings = {"samples": 2, "value": "words"}
    live = unspool.evaluate(model, "niah", [192], **settings)
    stored = unspool.evaluate("asset:tiny-base", "niah", [192], **settings)

    assert live.cells() == stored.cells() and model.training
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    assert unspool.evaluate(model, "niah", [192], **settings).cells()[0]["value"] == 0
    with pytest.raises(ConfigError, match="rope works only with a model on disk"):
        unspool.evaluate(model, "niah", [192], rope=unspool.YaRN(), context=512)


def test_a_server_needs_its_tokenizer():
    with pytest.raises(ConfigError, match="is a server; pass tokenizer="):
        unspool.evaluate("http://localhost:8000/v1", "niah", [192], model_name="m")


def test_a_result_is_saved_as_page_summary_and_folder(tmp_path):
    result = unspool.evaluate("asset:tiny-base", ["niah", "key_value"], ["512"], samples=2, backend="oracle")
    assert result.save(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert '"cells"' in result.save(tmp_path / "scores.json").read_text()
    assert (result.save(tmp_path / "scores") / "samples.jsonl").is_file()
    assert "<td>100%</td>" in result._repr_html_()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder of scores"):
        result.save(tmp_path / "mine")


def test_extending_without_a_method_takes_the_advised_base(loaded):
    model, _ = unspool.load("asset:tiny-base", device="cpu")
    unspool.extend(model, 2048)
    assert model.config.rope_parameters["rope_theta"] == 210_000
    with pytest.raises(ConfigError, match="context_length '2Q': unit 'Q' is not known"):
        unspool.extend(model, "2Q")


def test_harpe_on_another_attention_is_refused():
    from transformers import AutoModelForCausalLM

    folder = Path(unspool.__file__).parent / "assets" / "tiny-base"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    with pytest.raises(ConfigError, match=r'needs attn_implementation="unspool"; load the model with unspool.load'):
        unspool.extend(model, "2K", rope=unspool.HARPE(low=4e3, high=2e4))


# Results


def test_a_model_in_memory_answers_as_its_folder_and_stays_in_training(loaded):
    model, _ = unspool.load("asset:tiny-base", device="cpu")
    model.train()
    settings = {"max_new_tokens": 6, "device": "cpu"}
    live = unspool.generate(model, "The king had a daughter.", ["Who?", "Where?"], **settings)
    stored = unspool.generate("asset:tiny-base", "The king had a daughter.", ["Who?", "Where?"], **settings)

    assert [answer.text for answer in live] == [answer.text for answer in stored] and model.training
    assert live[1].cached_tokens > 0
    with pytest.raises(ConfigError, match="this model is in memory, so leave them out"):
        unspool.generate(model, "text", rope=unspool.YaRN(), context=512)


def test_results_save_what_their_file_names_end_in(tmp_path):
    advice = unspool.advise_rope("asset:tiny-base", 2048)
    assert advice.save(tmp_path / "new" / "page.html").read_text().startswith("<!doctype html>")
    assert '"methods"' in advice.save(tmp_path / "advice.json").read_text()
    assert "iframe" in str(advice._repr_html_()) and "bound of Men" in str(advice)
    with pytest.raises(ConfigError, match=r"ends in none of \.html, \.htm, \.json"):
        advice.save(tmp_path / "advice.txt")
    with pytest.raises(ConfigError, match="`format` 'pdf' is not known"):
        advice.save(tmp_path / "advice.txt", "pdf")
    with pytest.raises(ConfigError, match="is a folder; name the file"):
        advice.save(tmp_path, "html")


# The command line


def test_each_command_calls_its_function(monkeypatch, capsys):
    """The bodies are in the functions: a command with its function replaced does nothing else."""
    from typer.testing import CliRunner

    from unspool.cli.main import build_app

    class CalledError(Exception):
        pass

    def stop(*args, **options):
        raise CalledError

    functions = {
        ("run", "tiny"): "run",
        ("tokenize", "tiny"): "run",
        ("pack", "tiny"): "run",
        ("train", "tiny"): "run",
        ("launch", "tiny"): "launch",
        ("plan", "tiny"): "plan",
        ("rope", "--model", "asset:tiny-base", "--context", "2K"): "advise_rope",
        ("eval", "asset:tiny-base"): "evaluate",
        ("generate", "asset:tiny-base", "--question", "Who?"): "load_generator",
        ("judge", "runs/x"): "judge",
        ("judge", "--check", "graded.jsonl"): "check_judge",
        ("synth", "tiny"): "synthesize",
        ("report", "runs/x"): "report",
        ("study", "tiny"): "study",
        ("study", "tiny", "--dry-run"): "plan_study",
        ("verify",): "verify",
        ("export", "a", "b"): "export",
        ("inspect", "runs"): "inspect",
        ("inspect", "rows", "runs"): "inspect_rows",
        ("inspect", "distances", "runs"): "inspect_distances",
        ("inspect", "attention", "asset:tiny-base", "--text", "book.txt"): "inspect_attention",
    }
    for arguments, name in functions.items():
        function = getattr(unspool, name)
        monkeypatch.setattr(importlib.import_module(function.__module__), name, stop)
        done = CliRunner().invoke(build_app(), list(arguments))
        assert isinstance(done.exception, CalledError), (arguments, done.output, done.exception)


@pytest.mark.slow
def test_types_of_a_users_program(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(USER_PROGRAM))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(program)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"MYPYPATH": "", "PATH": "", "PYTHONPATH": str(Path(unspool.__file__).parents[1])},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Found 1 error" in done.stdout and 'List item 0 has incompatible type "int"' in done.stdout, done.stdout


USER_PROGRAM = """
    import unspool

    methods = [unspool.YaRN(), unspool.HARPE(low=1e6, high=5e6), unspool.PI(factor=4), unspool.Llama3()]
    model, tokenizer = unspool.load("asset:tiny-base")
    unspool.extend(model, context_length="2K", rope=unspool.ABF(base=8e6))
    dataset = unspool.pack(["a text"], tokenizer, seq_len="2K", strategy=unspool.UtK(probability=0.8))
    rows: int = len(dataset)
    result: unspool.EvalResult = unspool.evaluate("folder", suite="ruler", lengths=["4K", 8192], samples=20)
    text: str = result.table()
    unspool.export(model, "folder", dtype="bf16")
    fits: bool = unspool.plan("tiny").fits
    unspool.run("tiny", {"out": "runs/x"})
    answer: str = unspool.generate(model, "text", "question", max_new_tokens=5).text
    answers: list[unspool.TextAnswer] = unspool.generate("folder", "text", ["one", "two"])
    base: object = unspool.advise_rope(model, "2K")["abf"].parameters
    failed: tuple[str, ...] = unspool.study("tiny", only=["utk"]).failed + unspool.verify(device="cpu").failed
    unspool.report(["runs/a", "runs/b"]).save("both.html")
    view: unspool.AttentionView = unspool.inspect_attention(["a", "b"], "book.txt", head=[(1, 2)])
    script: str | None = unspool.launch("tiny", gpus=8, via="slurm", dry_run=True).script
    unspool.judge("runs/a", url="http://localhost:8000/v1", model_name="judge").table()
    unspool.evaluate("folder", suite=[1])
"""
