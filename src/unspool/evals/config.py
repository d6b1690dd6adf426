"""What one entry of a recipe's `evals` may say, a class per suite."""

from typing import Annotated, Literal

from pydantic import Field

from unspool.core.config import Config
from unspool.core.sizes import Size

Lengths = Annotated[list[Size], Field(min_length=1)]


class NiahEval(Config):
    """Needle in a haystack: facts hidden in prose at every depth, asked for at the end."""

    suite: Literal["niah"]
    lengths: Lengths
    samples: int = Field(20, ge=1, description="questions per length, spread evenly over depths")
    depths: int = Field(5, ge=1, description="how many depths between the start and the end")
    needles: int = Field(1, ge=1, description="facts per haystack, each asked for")
    value: Literal["numbers", "words"] = "numbers"
    text: str | None = Field(
        None, description="JSONL or text files for the haystack; the shipped held-out book if none"
    )


class KeyValueEval(Config):
    """JSON key-value recall: one object as long as the context, several keys asked for."""

    suite: Literal["key_value"]
    lengths: Lengths
    samples: int = Field(20, ge=1, description="questions per length")
    questions: int = Field(4, ge=1, description="questions per object")
    value: Literal["uuid", "words"] = "uuid"


class PerplexityEval(Config):
    """Loss by position on held-out text."""

    suite: Literal["perplexity"]
    length: Size
    samples: int = Field(8, ge=1, description="windows")
    text: str | None = Field(None, description="JSONL or text files; the shipped held-out book if none")


class TaskEval(Config):
    """What the suites that consist of tasks have in common."""

    suite: str
    lengths: Lengths
    samples: int = Field(100, ge=1, description="questions per task and length, spread evenly over depths and labels")
    tasks: list[str] = Field([], description="names of tasks; all of the suite when not given")
    mode: Literal["fixed", "reference"] = Field(
        "fixed", description="reference follows the suite's own code, defects included"
    )
    chat: Literal["auto", "on", "off"] = Field(
        "auto", description="auto: where the suite does, if the model has a template"
    )
    paths: dict[str, str] = Field(
        {}, description="name: file or folder that the suite reads instead of what is shipped"
    )
    answer_tokens: int | None = Field(
        None, ge=1, description="room for every answer, within the length; each task's own if none"
    )


class WordedEval(TaskEval):
    """Suites whose instructions a user may give in other words."""

    wording: str | None = Field(
        None, description="YAML or JSON file with the words of tasks, such as a paper's own; our own words if none"
    )


class RulerEval(WordedEval):
    """RULER: needles, variable tracing, word counting and questions at any length."""

    suite: Literal["ruler"]


class HelmetEval(WordedEval):
    """HELMET: recall, RAG, re-ranking, citations, long questions, summaries, many-shot labels."""

    suite: Literal["helmet"]


class LvEval(WordedEval):
    """LV-Eval: questions on long articles, scored by keywords and F1."""

    suite: Literal["lveval"]


class InfbenchEval(TaskEval):
    """∞Bench's key tasks: passkeys, numbers and values far into the context."""

    suite: Literal["infbench"]


class NochaEval(TaskEval):
    """NoCha: pairs of a true and a false claim about a whole book, of the user's own."""

    suite: Literal["nocha"]


Eval = Annotated[
    NiahEval | KeyValueEval | PerplexityEval | RulerEval | HelmetEval | LvEval | InfbenchEval | NochaEval,
    Field(discriminator="suite"),
]
