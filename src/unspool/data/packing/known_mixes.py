"""Published mixtures of sources by name, for `from: mix:NAME`: shares of tokens by source."""

from collections.abc import Mapping
from typing import Any

from unspool.core.config import did_you_mean

MIX_PREFIX = "mix:"
# ProLong's short documents. The paper and the released training script have the same numbers, but the script swaps
# those of Tulu and Wikipedia.
KNOWN_MIXES: dict[str, Mapping[str, float]] = {
    # Table 9, the final model, in percent.
    "shortmix": {
        "fineweb-edu": 27,
        "fineweb": 27,
        "tulu": 11,
        "stackexchange": 11,
        "wiki": 8,
        "openwebmath": 8,
        "arxiv": 8,
    },
    # Table 5, all ablations, in percent; those have no textbooks.
    "shortmix-ablations": {
        "fineweb-edu": 25,
        "fineweb": 25,
        "tulu": 10,
        "stackexchange": 10,
        "wiki": 10,
        "openwebmath": 10,
        "arxiv": 10,
    },
    # The released script of the 64K stage, as shares of all tokens.
    "shortmix-released": {
        "fineweb-edu": 0.10,
        "fineweb": 0.10,
        "tulu": 0.03,
        "stackexchange": 0.04,
        "wiki": 0.04,
        "openwebmath": 0.03,
        "arxiv": 0.03,
    },
}


def expand_mix(given: Any) -> Any:
    """Replace `mix:NAME` with its shares and return anything else unchanged; ValueError for an unknown name."""
    if not isinstance(given, str) or not given.startswith(MIX_PREFIX):
        return given
    name = given.removeprefix(MIX_PREFIX)
    if name not in KNOWN_MIXES:
        raise ValueError(f"mix {name!r} is not known{did_you_mean(name, KNOWN_MIXES)} Known: {', '.join(KNOWN_MIXES)}")
    return dict(KNOWN_MIXES[name])
