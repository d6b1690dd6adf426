"""Key-value recall: a JSON object that fills the context, then questions about some of its keys.

The queried keys are spread over the object. Objects grow by whole pairs. Other keys are lengthened to reach the exact
length.
"""

import uuid
from collections.abc import Callable
from itertools import cycle
from typing import Literal

import numpy as np
from pydantic import Field

from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.data.facts import distinct_keys, pair_question, pairs_text, split_pair_question
from unspool.evals.config import EvalConfig, Lengths
from unspool.evals.context_suite import ContextSuite
from unspool.evals.heldout import Materials
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.evals.prompts import Prompt, answer_room, encode, slack
from unspool.evals.suite import Question

Pairs = list[tuple[str, str]]
# Minimum tokens of a pair with quotes, colon and comma, for any tokenizer.
MIN_PAIR_TOKENS = 3
# Maximum steps to find the number of pairs. Two are nearly always enough.
CORRECTIONS = 8
# Lengthens a key by one or two tokens.
FILLER = "-x"


class KeyValueEval(EvalConfig):
    """JSON key-value recall: one object that fills the context, with questions about several keys."""

    suite: Literal["key_value"]
    lengths: Lengths = Field(
        description="Context lengths to score; prompt and answer together never exceed the length."
    )
    samples: int = Field(20, ge=1, description="Questions per length.")
    questions: int = Field(4, ge=1, description="Questions per JSON object.")
    value: Literal["uuid", "words"] = Field(
        "uuid", description="Type of the values to recall: UUIDs or single words. Words suit small models."
    )


def prompt(config: KeyValueEval, materials: Materials, *, length: int, seed: int, index: int) -> Prompt:
    rng = rng_for(seed, "kv", length, index)
    num_questions = min(config.questions, config.samples - index * config.questions)
    # One pair more than questions: it is a distractor, and its key can be lengthened.
    fewest = num_questions + 1
    drawn = _pairs(config, materials.words, max(fewest, length // MIN_PAIR_TOKENS), rng)
    # Position of each queried key within its equal part of the object.
    within = rng.random(num_questions)

    def pairs(count: int) -> Pairs:
        # Shuffle, because single words are drawn before joined ones, and all parts must be equally hard.
        order = rng_for(seed, "kv order", length, index).permutation(count)
        return [drawn[at] for at in order]

    def asked(count: int) -> list[int]:
        return [int((part + offset) * count / num_questions) for part, offset in enumerate(within)]

    def build(pairs: Pairs) -> Prompt:
        return _prompt(config, materials, pairs, asked(len(pairs)), length=length, index=index)

    least = build(pairs(fewest)).tokens
    if least > length:
        raise ConfigError(
            f"key_value: length {length} is too short: with this tokenizer, an object of {fewest} pairs, a question "
            f"and its answer need {least} tokens. Use a larger length, fewer questions per object or value: words."
        )
    count = _num_pairs(lambda count: build(pairs(count)).tokens, fewest, len(drawn), length)
    return _filled(build, pairs(count), asked(count), length)


def _num_pairs(tokens: Callable[[int], int], fewest: int, most: int, length: int) -> int:
    """Find the largest number of pairs that fits, in steps of the average pair."""
    best = count = fewest
    for _ in range(CORRECTIONS):
        used = tokens(count)
        if used <= length:
            best = max(best, count)
        step = int((length - used) // max(MIN_PAIR_TOKENS, used / count))
        if step == 0:
            break
        count = min(max(fewest, count + step), most)
    return best


def _filled(build: Callable[[Pairs], Prompt], pairs: Pairs, asked: list[int], length: int) -> Prompt:
    """Lengthen keys that no question uses, until the prompt has its length."""
    prompt = build(pairs)
    others = [at for at in reversed(range(len(pairs))) if at not in asked]
    for at in cycle(others):
        if length - prompt.tokens <= slack(length):
            break
        key, value = pairs[at]
        pairs = [*pairs[:at], (key + FILLER, value), *pairs[at + 1 :]]
        longer = build(pairs)
        if longer.tokens > length:
            break
        prompt = longer
    return prompt


def _prompt(
    config: KeyValueEval, materials: Materials, pairs: Pairs, asked: list[int], *, length: int, index: int
) -> Prompt:
    tokenizer, encoder = materials.tokenizer, PromptEncoder(materials.tokenizer, materials.form)
    # The context ends with the question's first newline, because tokenizers may merge it with the object.
    text = pairs_text(pairs) + "\n"

    def ask(key: str, value: str) -> Question:
        # A chat model answers a question; other models continue the object.
        split = split_pair_question(key) if encoder.sends_messages else ("", pair_question(key).removeprefix("\n"))
        meta = {"oracle": f" {value}."}
        return Question(context=text, question=split[0], prefix=split[1], references=(value,), meta=meta)

    return Prompt(
        suite="key_value",
        length=length,
        index=index,
        context_ids=np.concatenate([encoder.opening, encode(tokenizer, text)]),
        questions=[encoder.after_context(ask(*pairs[at])) for at in asked],
        answer_tokens=answer_room(tokenizer, [pairs[at][1] for at in asked]) + encoder.extra_answer_tokens,
        match=encoder.match("contains" if config.value == "uuid" else "start"),
        template_tokens=encoder.template_tokens,
    )


def _pairs(config: KeyValueEval, words: list[str], count: int, rng: np.random.Generator) -> Pairs:
    if config.value == "uuid":
        drawn = [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(2 * count)]
        return list(zip(drawn[:count], drawn[count:], strict=True))
    keys = distinct_keys(words, count, rng)
    order = rng.permutation(len(words))
    values = [words[order[at % len(words)]] for at in range(count)]
    # A value equal to its key could be guessed without the object.
    after = {word: words[(at + 1) % len(words)] for at, word in enumerate(words)}
    return [(key, after[value] if value == key else value) for key, value in zip(keys, values, strict=True)]


SUITE = ContextSuite(
    name="key_value",
    title="Key-value recall",
    config=KeyValueEval,
    measure="accuracy",
    build=prompt,
    questions_per_context=lambda config: config.questions,
)
