"""Settings of a recipe's `synth` entries: what is generated, by which generator, and what is rejected."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from unspool.core.config import Config
from unspool.core.errors import ConfigError
from unspool.core.http_client import check_url
from unspool.core.sizes import Size, format_size

Kind = Literal["qa", "rag", "summary"]
KINDS: tuple[Kind, ...] = ("qa", "rag", "summary")
# Errors that a mock generator can make.
Fault = Literal["garbage", "empty", "refers", "unsupported", "copy", "error", "slow"]
# Every reason for a rejection, with its explanation.
REJECT_REASONS = {
    "cut_short": "the reply reached reply_tokens before its end",
    "unparsable": "the reply does not have the requested form",
    "too_long": "the answer has more than answer_words words",
    "repeats": "the text repeats itself too often",
    "echoes": "the answer only repeats the question",
    "refers": "the text mentions a snippet or passage that its reader does not see",
    "unsupported": "the text lacks too many words of the answer, or one of its numbers",
    "judged_unsupported": "the judge says that the text does not support the answer",
    "judge_unparsable": "the judge's reply does not have the requested form",
    "near_copy": "near-duplicate of a text that was already kept",
    "contaminated": "the text shares an n-gram with an evaluation",
    "contaminated_document": "the document shares an n-gram with an evaluation",
    "does_not_fit": "the conversation is longer than length",
    "unreadable": "the chat template cannot render the conversation",
    "surplus": "its kind already has its full share of tokens",
}


class AnyGenerator(Config):
    """Settings of all generators."""

    reply_tokens: Size = Field(512, description="longest reply")
    concurrency: int = Field(8, ge=1, description="requests at a time")


class ServerGenerator(AnyGenerator):
    """Any server with an OpenAI-compatible API: vLLM, SGLang, llama.cpp, hosted ones."""

    kind: Literal["openai"]
    url: str = Field(min_length=1, description="such as http://localhost:8000/v1")
    model: str = Field(min_length=1, description="model name on the server")
    key_env: str = Field("OPENAI_API_KEY", description="environment variable with the API key, if one is needed")
    temperature: float = Field(0.7, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    requests_per_minute: float | None = Field(None, gt=0, description="rate limit")
    tokens_per_minute: float | None = Field(None, gt=0, description="rate limit of prompt and reply tokens together")
    timeout: float = Field(120.0, gt=0, description="seconds until a reply begins; it must be complete 60 s later")
    attempts: int = Field(6, ge=1, description="attempts per request")
    pause: float = Field(1.0, gt=0, description="seconds before the second attempt; doubled after each attempt")
    price_in: float = Field(0.0, ge=0, description="per million prompt tokens, for the estimate")
    price_out: float = Field(0.0, ge=0, description="per million reply tokens")

    @field_validator("url")
    @classmethod
    def _has_no_key(cls, value: str) -> str:
        try:
            check_url(value)
        except ConfigError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return value


class LocalGenerator(AnyGenerator):
    """A model in this process, through `transformers`, with greedy decoding."""

    kind: Literal["transformers"]
    model: str = Field(min_length=1, description="Hub id, folder or .gguf file")
    concurrency: int = Field(1, ge=1, description="requests per batch")


class MockGenerator(AnyGenerator):
    """Replies made from the prompt by rule, to try a recipe without a model and for tests."""

    kind: Literal["mock"]
    faults: dict[Fault, Annotated[float, Field(ge=0, le=1)]] = Field({}, description="fault: share of replies")
    seconds: float = Field(0.0, ge=0, description="seconds per reply")


Generator = Annotated[ServerGenerator | LocalGenerator | MockGenerator, Field(discriminator="kind")]


class ChecksConfig(Config):
    """When a pair or a summary is rejected."""

    support: float = Field(0.5, ge=0, le=1, description="smallest share of an answer's content words in its text")
    near: float = Field(0.7, gt=0, le=1, description="Jaccard similarity of word triples that makes a near-duplicate")
    answer_words: int = Field(400, ge=1, description="longest answer in words; summaries may be three times as long")


class DecontaminateConfig(Config):
    """Evaluation texts that must not be trained on."""

    evals: bool = Field(True, description="every prompt, question and answer of the recipe's evals")
    files: list[str] = Field([], description="text or JSONL files; of JSONL, every string in a record")
    ngram: int = Field(13, ge=5, le=50, description="consecutive words that two texts may not share")


class SynthConfig(Config):
    """One set of generated conversations."""

    from_: str | list[str] = Field(alias="from", description="source or sources of documents")
    generator: Generator
    judge: Generator | None = Field(None, description="a second model that checks whether the text supports an answer")
    shares: dict[Kind, Annotated[float, Field(ge=0)]] = Field(
        {"qa": 0.4, "rag": 0.3, "summary": 0.3}, description="kind: share of tokens"
    )
    tokens: Size | None = Field(None, description="tokens to generate; as many as the documents allow if none")
    documents: Size | None = Field(None, description="documents to use; all if none")
    per_document: int = Field(1, ge=1, description="conversations per document; RAG reuses their pairs")
    length: Size = Field(32768, description="longest conversation, in tokens")
    min_tokens: Size = Field(4096, description="shorter documents are skipped")
    chunk: Size = Field(1024, description="tokens of the part that a question is about, and of a RAG passage")
    passages: int = Field(32, ge=2, description="most passages in a RAG conversation")
    summary_chunk: Size = Field(4096, description="tokens per part that is summarized")
    summary_group: int = Field(8, ge=2, description="summaries that are joined into one")
    templates: str | None = Field(None, description="YAML file with your own templates")
    chat_template: str | None = Field(None, description="Jinja file, for tokenizers without a chat template")
    seed: int | None = Field(None, ge=0, description="the recipe's if none")
    ahead: int = Field(64, ge=1, description="conversations in progress at a time")
    checks: ChecksConfig = ChecksConfig.model_validate({})
    decontaminate: DecontaminateConfig = DecontaminateConfig.model_validate({})

    @property
    def sources(self) -> list[str]:
        return [self.from_] if isinstance(self.from_, str) else list(self.from_)

    @property
    def token_shares(self) -> dict[Kind, float]:
        """Shares that sum to 1, without kinds whose share is 0."""
        total = sum(self.shares.values())
        return {kind: self.shares[kind] / total for kind in KINDS if self.shares.get(kind, 0) > 0}

    @property
    def min_length(self) -> int:
        """Tokens that a part with its question and answer may take."""
        return 2 * self.chunk + self.generator.reply_tokens

    @field_validator("from_")
    @classmethod
    def _names_sources(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("name at least one source")
        if isinstance(value, list) and len(set(value)) < len(value):
            raise ValueError("a source is named twice")
        return value

    @field_validator("shares")
    @classmethod
    def _has_share(cls, value: dict[Kind, float]) -> dict[Kind, float]:
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
        if self.length < self.min_length:
            raise ValueError(
                f"length ({format_size(self.length)}) must be at least twice chunk plus reply_tokens "
                f"({self.min_length}), so that a part, its question and its answer fit"
            )
        return self
