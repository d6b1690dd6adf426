"""Unspool: extend the context window of open language models, from Python or from one recipe file.

Every name here is loaded when it is first used, so that `import unspool` takes milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unspool.core.errors import ConfigError, DataError, UnspoolError
    from unspool.data.strategies.cip import CIP
    from unspool.data.strategies.nextlong import NExtLong
    from unspool.data.strategies.pose import PoSE
    from unspool.data.strategies.upsample import Upsample
    from unspool.data.strategies.utk import UtK
    from unspool.models.attention.interface import register
    from unspool.models.extend import extend, load
    from unspool.recipe.packed_dataset import PackedDataset, pack
    from unspool.rope.harpe import HARPE
    from unspool.rope.methods import ABF, NTK, PI, Llama3, LongRoPE, YaRN
    from unspool.training.collator import Collator
    from unspool.verification.audits.run import AuditResult, audit

# Where each public name is defined. The imports above are the same table for type checkers.
_HOMES = {
    **dict.fromkeys(("load", "extend"), "unspool.models.extend"),
    **dict.fromkeys(("ABF", "NTK", "PI", "Llama3", "LongRoPE", "YaRN"), "unspool.rope.methods"),
    "HARPE": "unspool.rope.harpe",
    **dict.fromkeys(("pack", "PackedDataset"), "unspool.recipe.packed_dataset"),
    "UtK": "unspool.data.strategies.utk",
    "CIP": "unspool.data.strategies.cip",
    "NExtLong": "unspool.data.strategies.nextlong",
    "PoSE": "unspool.data.strategies.pose",
    "Upsample": "unspool.data.strategies.upsample",
    "Collator": "unspool.training.collator",
    **dict.fromkeys(("audit", "AuditResult"), "unspool.verification.audits.run"),
    "register": "unspool.models.attention.interface",
    **dict.fromkeys(("ConfigError", "DataError", "UnspoolError"), "unspool.core.errors"),
}

__all__ = [
    "ABF",
    "CIP",
    "HARPE",
    "NTK",
    "PI",
    "AuditResult",
    "Collator",
    "ConfigError",
    "DataError",
    "Llama3",
    "LongRoPE",
    "NExtLong",
    "PackedDataset",
    "PoSE",
    "UnspoolError",
    "Upsample",
    "UtK",
    "YaRN",
    "audit",
    "extend",
    "load",
    "pack",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'unspool' has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found  # so that this function is asked once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
