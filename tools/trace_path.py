"""List the functions that one document, or one evaluation question, passes through, with their number.

    .venv/bin/python tools/trace_path.py document RECIPE
    .venv/bin/python tools/trace_path.py question RECIPE

For `document`, RECIPE has a small source, a dataset and a stage of a few steps: it is trained, and the result is
exported. For `question`, RECIPE has a model and one entry of evaluations, and no stages: it is run, which asks the
question and writes the report. The recipe's own `out` must not exist yet, since finished parts would be skipped.

A line is printed for every function of src/unspool that was called, in the order of first calls: its file, and its
name in it. Processes that the command starts are followed. Lambdas, comprehensions, the bodies of modules and classes,
and what dataclasses generate do not count. --root names the checkout whose code runs, this one by default.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
# Where the command may be found, newest place first, and its verbs; OUT is the recipe's `out`.
COMMANDS = ("unspool.cli.main", "unspool.cli.app", "unspool.cli", "unspool.__main__")
VERBS = {
    "document": [["train", "RECIPE"], ["export", "OUT", "OUT/exported"]],
    "question": [["run", "RECIPE"]],
}

# Python imports it at the start of every process. Written in one call and appended, lines of several processes do not
# mix; written at once, they are there whatever ends the process.
TRACER = """
import os, sys, threading
LOG = os.open(os.environ["UNSPOOL_TRACE_LOG"], os.O_WRONLY | os.O_APPEND)
SOURCE = os.environ["UNSPOOL_TRACE_SOURCE"] + os.sep
IS_FUNCTION = 3  # CO_OPTIMIZED | CO_NEWLOCALS, which the bodies of modules and classes are not
seen = set()
def profile(frame, event, _):
    code = frame.f_code
    if event != "call" or code in seen:
        return
    seen.add(code)
    name, path = code.co_name, code.co_filename
    if path.startswith(SOURCE) and path.endswith(".py") and not name.startswith("<"):
        if code.co_flags & IS_FUNCTION == IS_FUNCTION:
            os.write(LOG, f"{path[len(SOURCE):]} {code.co_qualname}\\n".encode())
threading.setprofile(profile)
sys.setprofile(profile)
"""

RUNNER = f"""
import importlib, importlib.util
found = (importlib.import_module(name) for name in {COMMANDS!r} if importlib.util.find_spec(name.rpartition(".")[0])
         and importlib.util.find_spec(name))
next(module.main for module in found if callable(getattr(module, "main", None)))()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="List the functions that a document or a question passes through.")
    parser.add_argument("what", choices=VERBS)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose code is run")
    args = parser.parse_args()
    out = yaml.safe_load(args.recipe.read_text())["out"]
    if Path(out).exists():
        sys.exit(f"{out} exists: finished parts would be skipped; remove it first")
    commands = [
        [word.replace("RECIPE", str(args.recipe)).replace("OUT", out) for word in verb] for verb in VERBS[args.what]
    ]
    functions = trace(commands, args.root.resolve() / "src")
    print("\n".join(functions))
    files = {line.split(" ")[0] for line in functions}
    print(f"\n{args.what}: {len(functions)} functions in {len(files)} files")


def trace(commands: list[list[str]], source: Path) -> list[str]:
    """`file function` of every function that these commands called, in the order of first calls."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        log.touch()
        Path(scratch, "sitecustomize.py").write_text(TRACER)
        env = os.environ | {
            "PYTHONPATH": f"{scratch}{os.pathsep}{source}",
            "UNSPOOL_TRACE_LOG": str(log),
            "UNSPOOL_TRACE_SOURCE": str(source / "unspool"),
        }
        for command in commands:
            # Its output goes where messages go: what is printed here is the list.
            done = subprocess.run([sys.executable, "-c", RUNNER, *command], env=env, stdout=sys.stderr, check=False)
            if done.returncode:
                sys.exit(f"unspool {' '.join(command)} failed with exit code {done.returncode}")
        return list(dict.fromkeys(log.read_text().splitlines()))


if __name__ == "__main__":
    main()
