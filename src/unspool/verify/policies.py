"""Promise 5, memory settings: recompute, offload and tiling give the loss and gradient of plain `transformers`."""

import copy
from functools import partial

from unspool.model.memory import apply_memory
from unspool.model.memory_policy import MemoryPolicy
from unspool.verify.case import Case
from unspool.verify.packing import worst
from unspool.verify.result import Check, Measured
from unspool.verify.training import trained
from unspool.verify.truth import apart

# Tiles are to be cut: none of the rows is a multiple of this.
TILE = 37
POLICIES: dict[str, MemoryPolicy] = {
    "recompute": MemoryPolicy(recompute="full"),
    "keep-attention": MemoryPolicy(recompute="keep-attention"),
    "keep-products": MemoryPolicy(recompute="keep-attention", keep_products=2, keep_on_host=1),
    "recompute-every": MemoryPolicy(recompute="full", recompute_every=2),
    "offload": MemoryPolicy(recompute="full", offload=True),
    "mlp-tiles": MemoryPolicy(mlp_tiles=TILE),
    "heads-at-once": MemoryPolicy(attention_heads_at_once=1),
    "all-memory": MemoryPolicy(
        recompute="keep-attention", recompute_every=2, offload=True, mlp_tiles=TILE, attention_heads_at_once=1
    ),
}
WHAT = {
    "recompute": "every layer computed again in the backward pass",
    "keep-attention": "the same, but attention's results are kept",
    "keep-products": "matrix products of two layers are kept as well, one of them in host memory",
    "recompute-every": "two layers share a checkpoint",
    "offload": "checkpoints wait in host memory",
    "mlp-tiles": f"norms and MLPs over {TILE} tokens at a time",
    "heads-at-once": "attention for one KV head at a time",
    "all-memory": "all of these together",
}


def policy_checks() -> list[Check]:
    return [
        Check(name=name, promise=5, what=WHAT[name], measure=partial(under_policy, policy=policy))
        for name, policy in POLICIES.items()
    ]


def under_policy(case: Case, policy: MemoryPolicy) -> list[Measured]:
    """A step of a model with `policy` against the truth."""
    # A copy, since a policy is applied once and for good.
    model = copy.deepcopy(case.model)
    apply_memory(model, policy)
    return worst(case, [("unequal", apart(trained(model, case.steps["unequal"]), case.truths["unequal"]))])
