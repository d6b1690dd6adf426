"""Documents as the source makes them, at a length in tokens of 3.5 characters."""

import numpy as np

from unspool.core.rng import rng_for
from unspool.data.sources.synthetic.draft import compose, draw_layout
from unspool.data.sources.synthetic.fit_documents import TASKS

SENTENCES = [
    "The river runs past an old mill where nobody has ground any corn since the war.",
    "On market days it used to be different, and carts stood all along the bridge.",
    "Nobody remembers who planted the chestnut trees, but everybody sits under them.",
    "In winter the ferry rests, and the ferryman mends his nets in the kitchen.",
]


def document(task: str, tokens: int, index: int, *, with_prose: bool = False) -> str:
    style = rng_for(7, task, tokens, index)
    layout = draw_layout(style, with_prose=with_prose)
    text, _ = compose(TASKS[task].choose(style), layout, int(3.5 * tokens), SENTENCES, rng_for(8, task, tokens, index))
    return text


def characters(text: str) -> np.ndarray:
    """In place of a tokenizer: 3.5 characters are a token."""
    return np.zeros(round(len(text) / 3.5), dtype=np.uint32)
