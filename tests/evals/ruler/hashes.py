"""Print the hashes of RULER's prompts; a program of its own, so that tests can run it in other processes and Pythons.

python hashes.py LENGTH WORKERS
"""

import hashlib
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.resources import files
from multiprocessing import get_context
from typing import Any

from transformers import AutoTokenizer

from unspool.evals.suite import Ask
from unspool.evals.suites.ruler import SUITE

INDICES = (0, 5)


@cache
def sources() -> Any:
    return SUITE.load(AutoTokenizer.from_pretrained(str(files("unspool") / "assets" / "tiny-base")), {})


def prompt_hash(job: tuple[str, str, int, int]) -> str:
    task, mode, length, index = job
    ask = Ask(length=length, seed=42, index=index, mode="reference" if mode == "reference" else "fixed")
    asked = SUITE.tasks[task].build(sources(), ask)
    parts = [asked.context, asked.question, asked.prefix, *asked.references, repr(asked.depth)]
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:16]


def all_hashes(length: int, workers: int) -> dict[str, str]:
    modes = ("fixed", "reference")
    jobs = [(task, mode, length, index) for index in INDICES for task in SUITE.tasks for mode in modes]
    if workers == 1:
        found = list(map(prompt_hash, jobs))
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(prompt_hash, jobs))
    return {
        f"{task} {mode} {length} {index}": one for (task, mode, length, index), one in zip(jobs, found, strict=True)
    }


if __name__ == "__main__":
    print(json.dumps(all_hashes(int(sys.argv[1]), int(sys.argv[2])), indent=1))
