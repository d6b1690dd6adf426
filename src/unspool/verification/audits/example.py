"""The default setup of `unspool audit`: Unspool's collator in a plain torch loop with the bundled model."""

from typing import Any

from torch.utils.data import DataLoader

from unspool.data.facts import word_list
from unspool.models.extend import load
from unspool.training.collator import Collator


def build() -> tuple[Any, DataLoader[Any], Any]:
    """Return model, data and step, like the function in `unspool audit FILE:FUNCTION`."""
    model, tokenizer = load("asset:tiny-base", device="cpu")
    words = word_list()
    texts = [" ".join(words[number * 20 : number * 20 + 5 + 3 * number]) for number in range(8)]
    tokens = [tokenizer(text)["input_ids"] for text in texts]
    rows: Any = [
        {"input_ids": first + second, "seq_lengths": [len(first), len(second)]}
        for first, second in zip(tokens[::2], tokens[1::2], strict=True)
    ]
    return model, DataLoader(rows, batch_size=4, collate_fn=Collator(model).step), step


def step(model: Any, micro_batches: list[dict[str, Any]]) -> float:
    total = 0.0
    for batch in micro_batches:
        loss = model(**batch).loss
        loss.backward()
        total += loss.item()
    return total
