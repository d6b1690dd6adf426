"""Speed of generating RULER's prompts.

    python benchmarks/eval_prompts.py TOKENIZER [--length 102400] [--prompts 40] [--workers 2] [--mode fixed]

Prints prompts per second of each task over all workers, after each worker has loaded its sources and made one prompt.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any

from transformers import AutoTokenizer

from unspool.evals.suite import Ask
from unspool.evals.suites.ruler import SUITE


@cache
def sources(tokenizer: str) -> Any:
    return SUITE.load(AutoTokenizer.from_pretrained(tokenizer), {})


def make(job: tuple[str, str, int, str, int, int]) -> float:
    """Seconds per prompt in this process, without the first prompt of the task."""
    tokenizer, task, length, mode, first, count = job
    loaded, build = sources(tokenizer), SUITE.tasks[task].build
    build(loaded, Ask(length=length, seed=42, index=first, mode="reference" if mode == "reference" else "fixed"))
    begun = time.perf_counter()
    for index in range(first + 1, first + 1 + count):
        build(loaded, Ask(length=length, seed=42, index=index, mode="reference" if mode == "reference" else "fixed"))
    return (time.perf_counter() - begun) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--length", type=int, default=102_400)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mode", choices=["fixed", "reference"], default="fixed")
    options = parser.parse_args()
    each = options.prompts // options.workers
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for task in SUITE.tasks:
            jobs = [
                (options.tokenizer, task, options.length, options.mode, worker * (each + 1), each)
                for worker in range(options.workers)
            ]
            seconds = list(pool.map(make, jobs))
            rate = sum(1 / one for one in seconds)
            print(f"{task:16} {options.length:8} tokens  {rate:7.1f} prompts/s", flush=True)


if __name__ == "__main__":
    main()
