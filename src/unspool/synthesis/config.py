"""What an entry of a recipe's `synth` may say: what is generated, by whom, and what is refused.

Elsewhere: reading the file (recipes/), doing it (run.py).
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from unspool.core.config import Config
from unspool.core.sizes import Size, format_size

Kind = Literal["qa", "rag", "summary"]
KINDS: tuple[Kind, ...] = ("qa", "rag", "summary")
Share = Annotated[float, Field(ge=0)]
# What a pretended generator can do wrong, each with the share of its replies.
Fault = Literal["garbage", "empty", "refers", "unsupported", "copy", "error", "slow"]


class AnyGenerator(Config):
    """What all generators have in common."""

    reply_tokens: Size = Field(512, description="longest reply")
    concurrency: int = Field(8, ge=1, description="requests at a time")


class ServerGenerator(AnyGenerator):
    """Any server that speaks OpenAI's interface: vLLM, SGLang, llama.cpp, hosted ones."""

    kind: Literal["openai"]
    url: str = Field(min_length=1, description="such as http://localhost:8000/v1")
    model: str = Field(min_length=1, description="what the server calls the model")
    key_env: str = Field("OPENAI_API_KEY", description="environment variable that holds the key, if one is needed")
    temperature: float = Field(0.7, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    requests_per_minute: float | None = Field(None, gt=0, description="at most so many")
    tokens_per_minute: float | None = Field(None, gt=0, description="at most so many, prompt and reply together")
    timeout: float = Field(120.0, gt=0, description="seconds of one attempt")
    attempts: int = Field(6, ge=1, description="tries per request, with growing pauses between")
    pause: float = Field(1.0, gt=0, description="seconds before the second attempt; doubled every time")
    price_in: float = Field(0.0, ge=0, description="of a million prompt tokens, for the estimate")
    price_out: float = Field(0.0, ge=0, description="of a million reply tokens")

    @field_validator("url")
    @classmethod
    def _holds_no_key(cls, value: str) -> str:
        address = value.partition("://")[2]
        if not value.startswith(("http://", "https://")) or not address:
            raise ValueError("write an address such as http://localhost:8000/v1")
        if "@" in address.partition("/")[0] or "?" in value:
            raise ValueError("an address holds no name, password or key; put the key into the environment (key_env)")
        return value


class LocalGenerator(AnyGenerator):
    """A model in this process, through `transformers`; it answers greedily."""

    kind: Literal["transformers"]
    model: str = Field(min_length=1, description="Hub id, folder or .gguf file")
    concurrency: int = Field(1, ge=1, description="requests that are answered side by side")


class MockGenerator(AnyGenerator):
    """Only pretends: replies made from the text by rule, for trying a recipe and for tests."""

    kind: Literal["mock"]
    faults: dict[Fault, Annotated[float, Field(ge=0, le=1)]] = Field({}, description="fault: share of replies")
    seconds: float = Field(0.0, ge=0, description="how long a reply takes")


Generator = Annotated[ServerGenerator | LocalGenerator | MockGenerator, Field(discriminator="kind")]


class ChecksConfig(Config):
    """When a pair or a summary is refused."""

    support: float = Field(0.5, ge=0, le=1, description="least share of an answer's content words that its text holds")
    near: float = Field(0.7, gt=0, le=1, description="similarity (Jaccard, of word triples) above which one is a copy")
    answer_words: int = Field(400, ge=1, description="longest answer; summaries may have three times as many")


class DecontaminateConfig(Config):
    """What must not be trained on, since it is asked in evaluations."""

    evals: bool = Field(True, description="every prompt, question and answer of the recipe's evals")
    files: list[str] = Field([], description="text or JSONL files; of JSONL every text in a record")
    ngram: int = Field(13, ge=5, le=50, description="words in a row that two texts may not share")


class SynthConfig(Config):
    """One set of generated conversations."""

    from_: str | list[str] = Field(alias="from", description="source or sources of documents")
    generator: Generator
    judge: Generator | None = Field(None, description="a second model that is asked whether the text supports it")
    shares: dict[Kind, Share] = Field({"qa": 0.4, "rag": 0.3, "summary": 0.3}, description="kind: share of tokens")
    tokens: Size | None = Field(None, description="stop at about so many; until the documents end if none")
    documents: Size | None = Field(None, description="use at most so many documents; all if none")
    per_document: int = Field(1, ge=1, description="conversations begun per document; RAG reuses pairs beyond it")
    length: Size = Field(32768, description="longest conversation, in tokens")
    min_tokens: Size = Field(4096, description="shorter documents are left out")
    chunk: Size = Field(1024, description="tokens of the part a question is asked about, and of a passage")
    passages: int = Field(32, ge=2, description="most passages in a RAG conversation")
    summary_chunk: Size = Field(4096, description="tokens summarised at once")
    summary_group: int = Field(8, ge=2, description="summaries that are joined to one")
    templates: str | None = Field(None, description="YAML file with your own wording")
    chat_template: str | None = Field(None, description="Jinja file, for tokenizers without one")
    seed: int | None = Field(None, ge=0, description="the recipe's if none")
    ahead: int = Field(64, ge=1, description="conversations begun before the first of them is finished")
    checks: ChecksConfig = ChecksConfig.model_validate({})
    decontaminate: DecontaminateConfig = DecontaminateConfig.model_validate({})

    @property
    def sources(self) -> list[str]:
        return [self.from_] if isinstance(self.from_, str) else list(self.from_)

    @property
    def parts(self) -> dict[Kind, float]:
        """Shares that sum to 1, of the kinds that are asked for."""
        whole = sum(self.shares.values())
        return {kind: self.shares[kind] / whole for kind in KINDS if self.shares.get(kind, 0) > 0}

    @property
    def least_length(self) -> int:
        """Tokens into which a part and what is said about it fit."""
        return 2 * self.chunk + self.generator.reply_tokens

    @field_validator("from_")
    @classmethod
    def _names_something(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("name at least one source")
        if isinstance(value, list) and len(set(value)) < len(value):
            raise ValueError("a source is named twice")
        return value

    @field_validator("shares")
    @classmethod
    def _asks_for_something(cls, value: dict[Kind, float]) -> dict[Kind, float]:
        if not sum(value.values()) > 0:
            raise ValueError("at least one share must be above 0")
        return value

    @model_validator(mode="after")
    def _fits(self) -> "SynthConfig":
        if self.min_tokens < 2 * self.chunk:
            raise ValueError(
                f"min_tokens ({format_size(self.min_tokens)}) must be at least twice chunk "
                f"({format_size(self.chunk)}), so that a document has more than one"
            )
        if self.length < self.least_length:
            raise ValueError(
                f"length ({format_size(self.length)}) must be at least twice chunk plus reply_tokens "
                f"({self.least_length}), so that a part, its question and its answer fit"
            )
        return self
