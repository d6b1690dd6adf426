"""What tests of suites share: a tokenizer that is the same on every machine, and looking at prompts."""

import hashlib
from collections.abc import Mapping, Sequence
from statistics import fmean

from tests.evals.conftest import train_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from unspool.core.rng import rng_for
from unspool.data.facts import word_list
from unspool.evals.suite import Ask, Mode, Question, Task
from unspool.evals.suites import generated_world as generated
from unspool.evals.suites.helmet import alce, books, json_kv, rerank
from unspool.evals.suites.helmet.suite import CATEGORIES
from unspool.evals.task_suite import TaskSuite


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; nothing is trained, so nothing can differ."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def english_tokenizer() -> PreTrainedTokenizerFast:
    """Trained on what the generated suites say, so that their prompts are as short as with a real one."""
    texts = [passage.text for passage in generated.pool()] + word_list() * 3
    texts += [*alce.INSTRUCTIONS.values(), *books.INSTRUCTIONS.values(), rerank.INSTRUCTION]
    texts += [f" {json_kv.uuids(rng_for(0, 'tokenizer', number), 1)[0]}" for number in range(200)]
    return train_tokenizer(texts, vocab_size=3000, bos=False)


def num_tokens(tokenizer: PreTrainedTokenizerFast, task: Task, asked: Question) -> int:
    text = asked.context + asked.question + asked.prefix
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) + task.answer_tokens


def oracle(asked: Question) -> str:
    return str(asked.meta.get("oracle", " ".join(asked.references)))


def prompts_digest(
    suite: TaskSuite, tokenizer: PreTrainedTokenizerFast, lengths: list[int], mode: Mode = "fixed"
) -> str:
    """Of the first two prompts of every task at every length, but for tasks that are another suite's."""
    sources = suite.load(tokenizer, {})
    digest = hashlib.sha256()
    for name, task in sorted(suite.tasks.items()):
        if name.startswith("niah"):
            continue
        for length in lengths:
            for index in range(2):
                asked = task.build(sources, Ask(length=length, seed=1, index=index, mode=mode))
                said = [name, asked.context, asked.question, asked.prefix, *asked.references, repr(asked.depth)]
                digest.update("\x1f".join(said).encode())
    return digest.hexdigest()


def category_means(means: Mapping[str, float | None]) -> dict[str, float | None]:
    """Means of HELMET's categories and `overall`, from means by task; None if a task is missing."""

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if len(known) == len(values) else None

    found = {name: mean([means.get(task) for task in tasks]) for name, tasks in CATEGORIES.items()}
    return {**found, "overall": mean(list(found.values()))}
