"""The table of model families, from the tests that compare each with plain transformers."""

import ast
from pathlib import Path

from reference.markdown import code, page, table

ROOT = Path(__file__).parents[2]
TESTS = "tests/models/test_families.py"
VERIFIED = "src/unspool/verification/fixtures.py"
# Settings of a test's model that show what the family does besides plain attention.
FEATURES = {
    "sliding_window": "sliding window",
    "attn_logit_softcapping": "logit soft-caps",
    "num_local_experts": "mixture of experts",
    "num_experts": "mixture of experts",
    "no_rope_layers": "layers without RoPE",
    "logit_scale": "scaled logits",
    "logits_scaling": "scaled logits",
}


def families() -> dict[str, list[str]]:
    """The families that the tests cover, with the features of each one's test model."""
    found = {}
    for name, settings in _families(TESTS):
        keys = [key.value for node in ast.walk(settings) if isinstance(node, ast.Dict) for key in node.keys]
        found[name] = list(dict.fromkeys(FEATURES[key] for key in keys if key in FEATURES))
    return found


def verified() -> set[str]:
    """The config classes that `unspool verify` builds small models of."""
    return {
        keyword.value.value
        for _, settings in _families(VERIFIED)
        for keyword in settings.keywords
        if keyword.arg == "config"
    }


def _families(path: str) -> list[tuple[str, ast.expr]]:
    """Entries of the dict FAMILIES in a file, which is not imported because it needs torch."""
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "FAMILIES":
            return [(key.value, value) for key, value in zip(node.value.keys, node.value.values, strict=True)]
    raise ValueError(f"{path} has no dict FAMILIES.")


def families_page() -> str:
    intro = (
        f"For each family, `{TESTS}` builds a small random model. It checks that packed documents give the same logits "
        "and gradients as each document alone in plain `transformers`. `unspool verify` repeats its checks for the "
        "families in the last column on your machine."
    )
    rows = [
        (code(name.removesuffix("Text")), ", ".join(features) or "–", "yes" if name in verified() else "–")
        for name, features in families().items()
    ]
    return page("Model families", intro, [table(("family", "features tested", "`unspool verify`"), rows)])
