"""How many tokens a conversation has, as the rows of a stage will count them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unspool.data.chat_tokens import ChatEncoder, build_chat_encoder
from unspool.data.documents import Message
from unspool.data.readers.files import checked_text

# Only to name the type: importing it takes seconds.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Measure:
    """With a chat template exactly; without one the tokens of the messages alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str | None, *, name: str) -> None:
        self._plain = tokenizer.backend_tokenizer
        has_template = template is not None or bool(tokenizer.chat_template)
        self.encoder: ChatEncoder | None = (
            build_chat_encoder(tokenizer, template, source=name) if has_template else None
        )

    @property
    def digest(self) -> str | None:
        return self.encoder.template.digest if self.encoder else None

    def tokens(self, messages: Sequence[Message]) -> int:
        """Unreadable where the conversation cannot be written out."""
        for message in messages:
            checked_text(message.content)
        if self.encoder is not None:
            return len(self.encoder.encode(messages).tokens)
        return sum(len(self._plain.encode(message.content, add_special_tokens=False).ids) for message in messages)
