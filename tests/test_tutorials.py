"""Every command and every Python block of the tutorials runs, and prints what the page shows.

A page is executed in an empty folder, from top to bottom:

- A ```console fence: lines after `$ ` are commands for bash; other lines are the expected output.
- A ```python fence: executed in one namespace per page. A ```text fence directly below it is its expected output.
- A fence below a line that ends in "`NAME`:" and begins with "Save" is written to the file NAME.
- Any other ```text, ```sh or ```yaml fence has `<!-- not executed: reason -->` above it.

In expected output, a line `...` stands for any lines, and `...` within a line for any text. Durations, rates and
absolute paths are ignored. Other numbers have a tolerance (`same_number`).
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SAVE = re.compile(r"^Save .*`([^`]+)`:$")
NOT_EXECUTED = re.compile(r"^<!-- not executed: .+ -->$")
# Two cores that other work shares: the longest page takes minutes.
TIMEOUT_SECONDS = 1800

TIME = re.compile(r"\b\d+:\d\d(:\d\d)?\b|\b\d+(\.\d+)? ?(ms|s|min|h|hours|minutes|seconds)\b")
RATE = re.compile(r"[\d.,]+[KM]? ?(tok/s|tokens/s|tokens a second)")
ABSOLUTE_PATH = re.compile(r"(?<![\w.])/[\w./+-]+")
NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%?")


@dataclass(frozen=True)
class Step:
    """One fence of a page: what to do with it, and the output that the page shows for it."""

    kind: str  # console, python or the name of a file to write
    code: str
    expected: str | None = None


def read_steps(text):
    """Return the steps of a page, in order."""
    steps = []
    fences = list(FENCE.finditer(text))
    end_of_python = None
    for fence in fences:
        language, body = fence.groups()
        above = text[: fence.start()].rstrip("\n")
        line = above.rsplit("\n", 1)[-1]
        if NOT_EXECUTED.match(line):
            continue
        if saved := SAVE.match(line):
            steps.append(Step(f"file {saved[1]}", body))
        elif language == "console":
            steps.extend(read_console(body))
        elif language == "python":
            steps.append(Step("python", body))
            end_of_python = fence.end()
        elif language == "text" and end_of_python is not None and not text[end_of_python : fence.start()].strip():
            steps[-1] = Step("python", steps[-1].code, body)
        else:
            raise AssertionError(f"a fence ```{language} is not executed and does not say why:\n{body}")
    return steps


def read_console(body):
    """Split a console fence into commands with their output; a command continues after a trailing backslash."""
    steps = []
    lines = iter(body.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command += "\n" + next(lines)
            steps.append(Step("console", command, ""))
        elif steps:
            steps[-1] = Step("console", steps[-1].code, steps[-1].expected + line + "\n")
        else:
            raise AssertionError(f"a console fence begins with output: {line}")
    return steps


def run_page(text, folder):
    """Execute a page in `folder`; raise AssertionError for a failing command or for other output than shown."""
    namespace = {"__name__": "__main__"}
    for step in read_steps(text):
        if step.kind == "console":
            output = run_command(step.code, folder)
        elif step.kind == "python":
            output = run_python(step.code, folder, namespace)
        else:
            path = folder / step.kind.removeprefix("file ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.code, encoding="utf-8")
            continue
        if step.expected is not None and (missing := first_difference(step.expected, output)):
            raise AssertionError(f"{step.code}\nprinted\n{output}\nand the page shows\n{missing}")


def run_command(command, folder):
    """Run one command with the interpreter's own `unspool` and `python` first in PATH; return stdout and stderr."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "120",
        "PYTHONUNBUFFERED": "1",  # stdout and stderr in the order in which they are printed
        "NO_COLOR": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads leave the cores to other processes
    }
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise AssertionError(f"{command}\nended with exit code {done.returncode}:\n{done.stdout}")
    return done.stdout


def run_python(code, folder, namespace):
    """Execute code in `folder`; return what it printed."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(compile(code, "tutorial", "exec"), namespace)
    return printed.getvalue()


# Comparison


def first_difference(expected, output):
    """Return the first expected line that the output lacks at its place, or None."""
    wanted = [line.rstrip() for line in expected.splitlines() if line.strip()]
    printed = [line.rstrip() for line in output.splitlines() if line.strip()]
    at, anywhere = 0, False
    for line in wanted:
        if line.strip() == "...":
            anywhere = True
            continue
        stop = len(printed) if anywhere else at + 1
        found = next((i for i in range(at, min(stop, len(printed))) if same_line(line, printed[i])), None)
        if found is None:
            return line
        at, anywhere = found + 1, False
    if at < len(printed) and not anywhere and wanted:
        return f"(the end, and not) {printed[at]}"
    return None


def same_line(expected, printed):
    """Compare two lines: text exactly but for spaces, numbers with a tolerance, `...` as any text."""
    parts = re.findall(rf"\.\.\.|{NUMBER.pattern}|.", plain(expected))
    return matches(parts, plain(printed), 0)


def matches(parts, text, at):
    """Match `parts` (a character, a number or `...` each) against all of `text` from position `at` on."""
    if not parts:
        return at == len(text)
    first, rest = parts[0], parts[1:]
    if first == "...":
        return any(matches(rest, text, start) for start in range(at, len(text) + 1))
    if text.startswith(first, at) and matches(rest, text, at + len(first)):
        return True
    if NUMBER.fullmatch(first):
        number = None if text[at - 1 : at].isdigit() else NUMBER.match(text, at)
        return number is not None and same_number(first, number[0]) and matches(rest, text, number.end())
    return False


def plain(line):
    """Drop what differs from machine to machine, and the width of spaces and rules."""
    line = ABSOLUTE_PATH.sub("PATH", RATE.sub("RATE", TIME.sub("TIME", line)))
    return re.sub(r"\s+", " ", re.sub(r"([─━═-])\1+", r"\1", line)).strip()


def same_number(expected, printed):
    """Percentages within 20 points, decimals within 10% or 0.05, whole numbers within 2% (small ones exactly)."""
    if expected.endswith("%") != printed.endswith("%"):
        return False
    first, second = (float(text.strip("%").replace(",", "").replace("−", "-")) for text in (expected, printed))
    if expected.endswith("%"):
        return abs(first - second) <= 20
    if "." in expected or "e" in expected:
        return abs(first - second) <= max(0.1 * abs(first), 0.05)
    return abs(first - second) <= 0.02 * abs(first)


# The pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_commands_and_every_other_fence_says_why_it_is_not_executed(page):
    steps = read_steps(page.read_text(encoding="utf-8"))
    assert any(step.expected for step in steps), "no command with its output"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_as_printed(page, tmp_path, capsys):
    began = time.monotonic()
    run_page(page.read_text(encoding="utf-8"), tmp_path)
    with capsys.disabled():
        print(f"\n{page.stem}: {time.monotonic() - began:.0f} s")


# The runner

PAGE = """
Save this as `greet.sh`:

```sh
echo "hello from $(pwd)"
echo "step 4, loss 2.31, found 85%, 3.2 s"
```

```console
$ bash greet.sh
hello from /somewhere/else
step 4, loss 2.35, found 90%, 7.9 s
```

```python
count = 2
```

```python
print("count", count + 1)
```

```text
count 3
```

<!-- not executed: needs eight GPUs -->
```sh
exit 1
```
"""


def test_a_correct_page_passes(tmp_path):
    run_page(PAGE, tmp_path)
    assert (tmp_path / "greet.sh").is_file()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("step 4, loss 2.35", "step 5, loss 2.35"),
        ("loss 2.35", "loss 2.99"),
        ("found 90%", "found 60%"),
        ("step 4, loss 2.35", "stage 4, loss 2.35"),
        ("hello from /somewhere/else\n", "hello from /somewhere/else\nanother line\n"),
        ("step 4, loss 2.35, found 90%, 7.9 s\n", ""),
        ("count 3", "count 4"),
    ],
)
def test_wrong_output_fails(tmp_path, right, wrong):
    with pytest.raises(AssertionError, match="and the page shows"):
        run_page(PAGE.replace(right, wrong), tmp_path)


@pytest.mark.parametrize("command", ["false", "unspool run no-such-recipe", "no-such-command-at-all"])
def test_a_failing_command_fails(tmp_path, command):
    with pytest.raises(AssertionError, match="ended with exit code"):
        run_page(f"```console\n$ {command}\n...\n```\n", tmp_path)


def test_an_exception_in_python_fails(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run_page("```python\n1 / 0\n```\n", tmp_path)


def test_a_fence_that_is_not_executed_must_say_why(tmp_path):
    with pytest.raises(AssertionError, match="does not say why"):
        run_page("```sh\nmake demo\n```\n", tmp_path)


def test_ellipses_stand_for_lines_and_for_text():
    output = "one\ntwo\nthree of many words\nfour\n"
    assert first_difference("one\n...\nfour\n", output) is None
    assert first_difference("...\nthree ... words\n...\n", output) is None
    assert first_difference("one\n...\n", output) is None
    assert first_difference("one\nthree of many words\nfour\n", output) == "three of many words"
    assert first_difference("...\nthree ... verbs\n...\n", output) == "three ... verbs"
    assert first_difference("loss 2.31 ... of 20\n", "loss 2.35 at 1K, n 16 of 20\n") is None
    assert first_difference("loss ... 85% ...\n", "loss 2.35, n 16, found 83% of 20\n") is None
    assert first_difference("loss 2.31 ... of 20\n", "loss 2.99 at 1K, n 16 of 20\n") is not None
    assert first_difference("...\nfour\none\n", output) == "one"
    assert first_difference("smollm2-32k: ... (7 arms)\n", "smollm2-32k: 8K to 32K (7 arms)\n") is None
    assert first_difference("smollm2-32k: ... (7 arms)\n", "smollm2-32k: 8K to 32K (8 arms)\n") is not None
    # A command whose output the page does not show may print anything.
    assert first_difference("", output) is None
