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
    "refers": "the text mentions a snippet or passage that its reader does not have",
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

    reply_tokens: Size = Field(512, description="Longest reply, in tokens.")
    concurrency: int = Field(8, ge=1, description="Number of requests at the same time.")


class ServerGenerator(AnyGenerator):
    """Any server with an OpenAI-compatible API: vLLM, SGLang, llama.cpp, hosted ones."""

    kind: Literal["openai"] = Field(description="A server with an OpenAI-compatible API.")
    url: str = Field(
        min_length=1, description="Base address of the API, such as http://localhost:8000/v1, without a key."
    )
    model: str = Field(min_length=1, description="Model name on the server.")
    key_env: str = Field(
        "OPENAI_API_KEY", description="Environment variable that holds the API key, if the server needs one."
    )
    temperature: float = Field(0.7, ge=0, le=2, description="Sampling temperature; 0 is greedy decoding.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Nucleus sampling: sample from the most likely tokens of this total probability."
    )
    requests_per_minute: float | None = Field(None, gt=0, description="Maximum requests per minute. Default: no limit.")
    tokens_per_minute: float | None = Field(
        None, gt=0, description="Maximum tokens per minute, of prompts and longest replies together. Default: no limit."
    )
    timeout: float = Field(120.0, gt=0, description="Seconds until a reply must begin. It must be complete 60 s later.")
    attempts: int = Field(6, ge=1, description="Attempts per request.")
    pause: float = Field(
        1.0, gt=0, description="Seconds before the second attempt. Each further pause is twice as long."
    )
    price_in: float = Field(0.0, ge=0, description="Price of a million prompt tokens, for the cost estimate.")
    price_out: float = Field(0.0, ge=0, description="Price of a million reply tokens, for the cost estimate.")

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

    kind: Literal["transformers"] = Field(description="A model in this process, with greedy decoding.")
    model: str = Field(min_length=1, description="Hub id, folder or .gguf file of the model.")
    concurrency: int = Field(1, ge=1, description="Number of requests per batch.")


class MockGenerator(AnyGenerator):
    """Replies made from the prompt by rule, to try a recipe without a model and for tests."""

    kind: Literal["mock"] = Field(
        description="Replies built from the prompt by fixed rules, without a model, for tests."
    )
    faults: dict[Fault, Annotated[float, Field(ge=0, le=1)]] = Field(
        {}, description="Faults to simulate, with the share of replies that have each."
    )
    seconds: float = Field(0.0, ge=0, description="Seconds that each reply takes.")


Generator = Annotated[ServerGenerator | LocalGenerator | MockGenerator, Field(discriminator="kind")]


class ChecksConfig(Config):
    """When a pair or a summary is rejected."""

    support: float = Field(
        0.5, ge=0, le=1, description="Smallest share of an answer's content words that must occur in its text."
    )
    near: float = Field(
        0.7, gt=0, le=1, description="Minimum Jaccard similarity of word triples at which a text is a near-duplicate."
    )
    answer_words: int = Field(400, ge=1, description="Longest answer in words. Summaries may be three times as long.")


class DecontaminateConfig(Config):
    """Evaluation texts that must not be trained on."""

    evals: bool = Field(
        True,
        description="Reject texts that share an n-gram with the prompts, questions or answers of the recipe's `evals`.",
    )
    files: list[str] = Field(
        [], description="Text or JSONL files to decontaminate against. Every string of a JSONL record counts."
    )
    ngram: int = Field(13, ge=5, le=50, description="Length of the n-gram in words.")


class SynthConfig(Config):
    """One set of generated conversations."""

    from_: str | list[str] = Field(alias="from", description="Source or sources of the documents.")
    generator: Generator = Field(description="The language model that writes the conversations.")
    judge: Generator | None = Field(
        None, description="A second model that checks whether the text supports each answer. Default: no such check."
    )
    shares: dict[Kind, Annotated[float, Field(ge=0)]] = Field(
        {"qa": 0.4, "rag": 0.3, "summary": 0.3},
        description="Share of tokens for each kind of conversation. Only the proportions count.",
    )
    tokens: Size | None = Field(None, description="Tokens to generate. Default: as many as the documents allow.")
    documents: Size | None = Field(None, description="Maximum number of documents to use. Default: all.")
    per_document: int = Field(
        1,
        ge=1,
        description="Conversations per document, each about another part. RAG conversations reuse their questions.",
    )
    length: Size = Field(32768, description="Longest conversation, in tokens.")
    min_tokens: Size = Field(4096, description="Documents shorter than this are skipped. At least twice `chunk`.")
    chunk: Size = Field(1024, description="Tokens per document part that a question is about, and per RAG passage.")
    passages: int = Field(32, ge=2, description="Maximum number of passages in a RAG conversation.")
    summary_chunk: Size = Field(4096, description="Tokens per part that is summarized at once.")
    summary_group: int = Field(8, ge=2, description="Number of summaries that are merged into one.")
    templates: str | None = Field(
        None, description="YAML file with your own prompt templates. Default: the bundled templates."
    )
    chat_template: str | None = Field(
        None, description="Jinja file with a chat template. Required if the tokenizer has none."
    )
    seed: int | None = Field(None, ge=0, description="Random seed. Default: the recipe's `seed`.")
    ahead: int = Field(64, ge=1, description="Number of conversations in progress at the same time.")
    checks: ChecksConfig = Field(ChecksConfig.model_validate({}), description="When a generated text is rejected.")
    decontaminate: DecontaminateConfig = Field(
        DecontaminateConfig.model_validate({}), description="Evaluation texts that generated text must not contain."
    )

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
