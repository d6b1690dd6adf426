"""Run a study on one GPU within a time limit: several runs at a time, earlier ones first.

    python tools/run_study.py start out --study utk-small --data data --model MODEL abf-s0 utk-80-s0
    python tools/run_study.py start base --recipe docs/results/plan/untrained.yaml --data data --model MODEL base-s0
    python tools/run_study.py status out --wait 500      the state of every run, again after each change, for 500 s
    python tools/run_study.py pack out results           what the runs have found, as a few small files
    python tools/run_study.py longppl out --data data --seed 0 abf utk-80 cip-2
    python tools/run_study.py short out --data eval --model MODEL --seed 0 base abf utk-80 cip-2
    python tools/run_study.py short out --data eval --model MODEL base prolong-small.128k prolong-small

A run trains, then it is scored. When one ends, the next starts. At most `--at-once` runs are active, of them at most
`--training` before their scores: while one run starts, compiles or builds prompts, the others use the GPU. At the limit
all runs stop cleanly; the same command continues them. `--detach` returns at once and leaves the runs to a process of
their own. `--mps` lets them use the GPU at the same time instead of in turns. `start`, `status` and `pack` print no
score: those of the plan are read after the last run.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mps import find_control, mps
from run_states import (
    ACTIVE,
    FAILED,
    FINISHED,
    LOGS,
    SCORING,
    STARTED,
    STARTING,
    STOPPED,
    WAITING,
    describe,
    phase_of,
)
from study_results import LONGPPL, SHORT, pack
from unspool.core.artifacts import write_atomic
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.lock import LOCK
from unspool.recipe.paths import bundled_studies
from unspool.studies.load import load_study
from unspool.studies.raw_results import RECIPE

SHORT_TASKS = Path(__file__).resolve().parents[1] / "docs" / "results" / "plan" / "short_tasks"
STATE = "runs.json"
GRACE = 18  # seconds that a run gets to save after SIGINT
POLL = 0.5


# One run


@dataclass
class Run:
    name: str
    command: list[str]
    out: Path
    needs: str | None = None  # a run whose weights this one averages
    process: subprocess.Popen[bytes] | None = None
    state: str = WAITING
    began: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # by state

    @property
    def folder(self) -> Path:
        return self.out / self.name

    @property
    def log(self) -> Path:
        return self.out / LOGS / f"{self.name}.log"

    def start(self, cwd: Path) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log.write(f"{STARTED} {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            log.flush()
            # A process group of its own, so that no worker outlives a run that had to be killed.
            self.process = subprocess.Popen(
                self.command, cwd=cwd, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.enter(STARTING)

    def enter(self, state: str) -> None:
        now = time.monotonic()
        if self.state in ACTIVE:
            self.seconds[self.state] = round(self.seconds.get(self.state, 0) + now - self.began, 1)
        self.state, self.began = state, now

    def refresh(self, *, stopping: bool) -> bool:
        """Read the state from process and folder; return whether it changed."""
        before = self.state
        if self.process is not None and self.state in ACTIVE:
            status = self.process.poll()
            if status is None:
                phase = phase_of(self.folder)
                if phase != self.state:
                    self.enter(phase)
            else:
                self.enter(FINISHED if status == 0 else STOPPED if stopping else FAILED)
        return self.state != before

    def signal(self, number: int, *, group: bool = False) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        try:
            if group:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)
        except ProcessLookupError:
            pass


# All runs


@dataclass
class Queue:
    runs: list[Run]
    cwd: Path
    out: Path
    at_once: int
    training: int
    limit: float
    stopping: bool = False

    def work(self) -> None:
        """Run everything that is not finished, until the limit."""
        end = time.monotonic() + self.limit
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(self, "stopping", True))
        self.report(end)
        while not self.stopping and any(run.state in (WAITING, *ACTIVE) for run in self.runs):
            self.start_next(end)
            self.refresh(end)
            self.stopping = self.stopping or time.monotonic() >= end
            time.sleep(POLL)
        self.stop(end)

    def start_next(self, end: float) -> None:
        active = [run for run in self.runs if run.state in ACTIVE]
        before_scores = sum(run.state != SCORING for run in active)
        open_runs = {run.name for run in self.runs if run.state in (WAITING, *ACTIVE)}
        following = next((run for run in self.runs if run.state == WAITING and run.needs not in open_runs), None)
        if following and len(active) < self.at_once and before_scores < self.training:
            following.start(self.cwd)
            self.report(end)

    def refresh(self, end: float) -> None:
        if [run for run in self.runs if run.refresh(stopping=self.stopping)]:
            self.report(end)

    def stop(self, end: float) -> None:
        self.stopping = True
        for run in self.runs:
            run.signal(signal.SIGINT)
        grace = time.monotonic() + GRACE
        while any(run.state in ACTIVE for run in self.runs) and time.monotonic() < grace:
            self.refresh(end)
            time.sleep(POLL)
        for run in self.runs:
            run.signal(signal.SIGKILL, group=True)
            if run.process is not None:
                run.process.wait()
        self.refresh(end)
        self.report(end, ended=True)

    def report(self, end: float, *, ended: bool = False) -> None:
        facts = {
            "pid": os.getpid(),
            "ended": ended,
            "ends_at": round(time.time() + end - time.monotonic()),
            "runs": {run.name: {"state": run.state, "seconds": run.seconds} for run in self.runs},
        }
        write_atomic(self.out / STATE, json.dumps(facts, indent=1) + "\n")
        print(describe(self.out, facts), flush=True)


# Commands


def start(args: argparse.Namespace) -> int:
    queue = build_queue(args)
    control = find_control() if args.mps else None
    if args.detach:
        command = [sys.executable, __file__, *(part for part in sys.argv[1:] if part != "--detach")]
        with (args.out / "runs.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        print(f"process {process.pid} runs {len(queue.runs)} runs, log: {args.out / 'runs.log'}")
        return 0
    with nullcontext() if control is None else mps(control, queue.out):
        queue.work()
    return 1 if any(run.state == FAILED for run in queue.runs) else 0


def build_queue(args: argparse.Namespace) -> Queue:
    if bool(args.study) == bool(args.recipe):
        raise ConfigError("start: give either --study or --recipe.")
    if not args.data.is_dir():
        raise ConfigError(f"--data {args.data}: no such folder; write it with tools/prepare_corpus.py.")
    if min(args.at_once, args.training, args.limit) < 1:
        raise ConfigError("--at-once, --training and --limit must be at least 1.")
    facts = read_state(args.out)
    if facts and not facts["ended"] and is_alive(facts["pid"]):
        raise ConfigError(f"{args.out}: process {facts['pid']} already runs them; stop it or wait for it.")
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    study = args.study if args.study in bundled_studies() else str(Path(args.study or "").resolve())
    changes = [f"model={args.model.resolve()}", f"engine.workers={args.workers}", *args.set]
    options = [part for change in changes for part in ("--set", change)]

    def command(name: str) -> list[str]:
        verb = study_command(name) if args.study else recipe_command(name)
        return [sys.executable, "-m", "unspool", *verb, *options]

    def study_command(name: str) -> list[str]:
        return ["study", study, "--only", name, "--seeds", str(seed_of(name)), "--out", str(out)]

    def recipe_command(name: str) -> list[str]:
        recipe = str(Path(args.recipe).resolve()) if Path(args.recipe).is_file() else args.recipe
        return ["run", recipe, "--set", f"out={out / name}"]

    runs = [Run(name, command(name), out) for name in args.runs]
    if args.study:
        check_runs(study, changes, runs)
    return Queue(runs, args.data.resolve().parent, out, args.at_once, args.training, args.limit)


def check_runs(study: str, changes: list[str], runs: list[Run]) -> None:
    """Refuse unknown names, and mark runs that are finished with these settings."""
    from unspool.studies.run import is_done  # imports torch

    loaded = load_study(study, overrides=changes, seeds=sorted({seed_of(run.name) for run in runs}), out=runs[0].out)
    known = {run.name: run for run in loaded.runs}
    for run in runs:
        if run.name not in known:
            raise ConfigError(f"{study} has no run {run.name!r}. It has {', '.join(known)}.")
        merge = known[run.name].merge
        run.needs = f"{merge.arm}-s{known[run.name].seed}" if merge else None
        if is_done(loaded, known[run.name]):
            run.state = FINISHED


def seed_of(name: str) -> int:
    arm, _, seed = name.rpartition("-s")
    if not arm or not seed.isdecimal():
        raise ConfigError(f"{name!r} is not a run; write ARM-sSEED, such as abf-s0.")
    return int(seed)


def read_state(out: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((out / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def status(args: argparse.Namespace) -> int:
    end, shown = time.monotonic() + args.wait, None
    while True:
        facts = read_state(args.out)
        if not facts:
            raise ConfigError(f"{args.out}: no runs were started there; use `start`.")
        facts["ended"] = facts["ended"] or not is_alive(facts["pid"])
        if args.json and (facts["ended"] or time.monotonic() >= end):
            print(json.dumps(facts))
            return 0
        if not args.json and facts != shown:
            print(describe(args.out, facts), flush=True)
        if facts["ended"] or time.monotonic() >= end:
            return 0
        shown = facts
        time.sleep(POLL)


def longppl(args: argparse.Namespace) -> int:
    """Score LongPPL of trained arms; the first arm chooses the key tokens."""
    options = ["--suite", LONGPPL, "--lengths", "32K", "--samples", "24", "--seed", str(args.seed)]
    options += ["--text", str((args.data / "heldout.jsonl.zst").resolve())]
    models = find_models(args)
    first = next(iter(models))
    key_tokens = ["--set", f"key_tokens={args.out.resolve() / LONGPPL / first}"]
    for name, model in models.items():
        score(model, args.out.resolve() / LONGPPL / name, [*options, *(key_tokens if name != first else [])])
    return 0


def short(args: argparse.Namespace) -> int:
    """Score short tasks of trained arms, from local files."""
    if not (args.data / "hellaswag.jsonl.zst").is_file():
        raise ConfigError(f"--data {args.data}: holds no hellaswag.jsonl.zst; give the folder of the short tasks.")
    os.environ["SHORT_DATA"] = str(args.data.resolve())
    options = ["--suite", SHORT, "--samples", "400", "--path", f"tasks={SHORT_TASKS}"]
    options += ["--tasks", ",".join(path.stem for path in sorted(SHORT_TASKS.glob("local_*.yaml")))]
    for name, model in find_models(args).items():
        score(model, args.out.resolve() / SHORT / name, options)
    return 0


def find_models(args: argparse.Namespace) -> dict[str, Path]:
    """Return the models of trained or averaged arms and of `base`, the untouched model, by run."""
    found: dict[str, Path] = {}
    for arm in args.arms:
        name = f"{arm}-s{args.seed}"
        model = find_model(args.out.resolve(), arm, args.seed) or (args.model if arm == "base" else None)
        if model is None:
            run = args.out.resolve() / name
            raise ConfigError(f"{run}: no trained model; run the arm first, or give --model for base.")
        found[name] = model
    return found


def find_model(out: Path, arm: str, seed: int) -> Path | None:
    """Return the model of a run's last stage, or of the earlier stage in ARM.STAGE; None if there is none."""
    run, stage = out / f"{arm}-s{seed}", ""
    if not run.is_dir() and "." in arm:
        arm, _, stage = arm.rpartition(".")
        run = out / f"{arm}-s{seed}"
    if not stage and (run / "model").is_dir():
        return run / "model"  # averaged weights
    if not stage and (run / RECIPE).is_file():
        stages = yaml.safe_load((run / RECIPE).read_text(encoding="utf-8")).get("stages")
        stage = stages[-1]["name"] if stages else ""
    model = run / "stages" / stage / "model"
    return model if stage and model.is_dir() else None


def score(model: Path, out: Path, options: list[str]) -> None:
    """Run `unspool eval`, which prints its own errors."""
    out.parent.mkdir(parents=True, exist_ok=True)
    # `eval` locks the folder with the nearest lock file. Without this one, that is the study's, which active runs hold.
    # They read and write nothing here, and a model that is in its place no longer changes.
    (out.parent / LOCK).touch()
    status = subprocess.run(
        [sys.executable, "-m", "unspool", "eval", str(model), *options, "--out", str(out)], check=False
    ).returncode
    if status < 0:
        raise ConfigError(f"{out}: signal {-status} stopped this evaluation; run the command again to continue it.")
    if status:
        raise SystemExit(2)


def pack_results(args: argparse.Namespace) -> int:
    packed = pack(args.out, args.folder, most=int(args.max_mb * 2**20), files=args.max_files)
    if args.json:
        print(json.dumps(packed))
        return 0
    for name, size in packed["files"].items():
        print(f"{args.folder / name}: {size / 1000:.0f} KB")
    print(
        f"finished: {', '.join(packed['finished']) or 'none'}; unfinished: {', '.join(packed['unfinished']) or 'none'}"
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("start", help="run what is not finished")
    one.add_argument("out", type=Path, help="folder of the study")
    one.add_argument("runs", nargs="+", metavar="RUN", help="ARM-sSEED, in their order; with --recipe, any name")
    one.add_argument("--study", help="name or file")
    one.add_argument("--recipe", help="name or file; its folder is OUT/RUN")
    one.add_argument("--data", type=Path, default=Path("data"), help="folder of tools/prepare_corpus.py")
    one.add_argument("--model", type=Path, required=True, help="folder of the base model")
    one.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a change in every run; repeatable"
    )
    one.add_argument("--limit", type=float, default=86400, help="seconds after which all runs stop")
    one.add_argument("--at-once", type=int, default=4, help="most active runs (default: 4)")
    one.add_argument("--training", type=int, default=2, help="most runs before their scores (default: 2)")
    one.add_argument("--workers", type=int, default=5, help="processes per run that prepare documents (default: 5)")
    one.add_argument(
        "--mps",
        action="store_true",
        help="let runs use the GPU at the same time, by NVIDIA MPS; a fatal GPU error of one run then stops all",
    )
    one.add_argument("--detach", action="store_true", help="return at once; the runs go on")
    one.set_defaults(function=start)
    two = commands.add_parser("status", help="print the state of every run")
    two.add_argument("out", type=Path, help="folder of `start`")
    two.add_argument(
        "--wait", type=float, default=0, metavar="SECONDS", help="print changes until the runs end, at most"
    )
    two.add_argument("--json", action="store_true", help="print one JSON object at the end")
    two.set_defaults(function=status)
    three = commands.add_parser("pack", help="write results without weights into a few files")
    three.add_argument("out", type=Path, help="folder of `start`")
    three.add_argument("folder", type=Path, help="folder to write")
    three.add_argument("--max-mb", type=float, default=16, help="most MiB of a file (default: 16)")
    three.add_argument("--max-files", type=int, default=8, help="most files (default: 8)")
    three.add_argument("--json", action="store_true", help="print one JSON object")
    three.set_defaults(function=pack_results)
    for name, function, text in (
        (LONGPPL, longppl, "LongPPL; the first arm chooses the key tokens"),
        (SHORT, short, "short tasks"),
    ):
        four = commands.add_parser(name, help=f"score {text}")
        four.add_argument("out", type=Path, help="folder of `start`")
        four.add_argument(
            "arms", nargs="+", help="trained arms, ARM.STAGE for an earlier stage, or base for the untouched model"
        )
        four.add_argument("--data", type=Path, required=True, help="folder with heldout.jsonl.zst or the short tasks")
        four.add_argument("--model", type=Path, help="folder of the untouched model")
        four.add_argument("--seed", type=int, default=0)
        four.set_defaults(function=function)
    args = parser.parse_args()
    try:
        return int(args.function(args))
    except (UnspoolError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
