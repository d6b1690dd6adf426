"""How tokens are read: with which tokenizer, and what is to be said about it."""

from dataclasses import dataclass, field

from unspool.data.tokens import Encoder
from unspool.inspect.decode import Decoder


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Tokens are shown as text where `decoder` is there, else as numbers."""

    decoder: Decoder | None = None
    encoder: Encoder | None = None  # for text that was never tokenised
    name: str | None = None
    notes: list[str] = field(default_factory=list)
