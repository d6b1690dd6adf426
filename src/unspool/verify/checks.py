"""The list of checks, by promise. A new one is a function of a `Case` and a line here."""

from functools import partial

from unspool.model.plain_process import PlainProcess
from unspool.verify import chunking, exports, killing, packing, policies, resuming, splitting, tables
from unspool.verify.ranking import Answers, rank_check
from unspool.verify.result import Check

PROMISES = {
    1: "Packing changes neither a document's loss nor its gradient; perturbing one document changes no other.",
    2: "Loss and gradient of a step do not depend on its split into micro-batches, the order of its rows or ranks.",
    3: "A run killed at any moment and resumed gives the same weights as one never killed.",
    4: "Exported checkpoints give the same logits in plain transformers.",
    5: "Chunked loss, recompute, offload and tiling change memory, not results.",
}


def build_checks(plain: PlainProcess, *, kills: int = killing.KILLS, ranks: Answers | None = None) -> dict[str, Check]:
    """All checks by name; exports are loaded by `plain`, a run is killed so many times, `ranks` share a step."""
    return {
        check.name: check
        for check in (
            Check(
                name="packed",
                promise=1,
                what="each document's loss and gradient in a packed row, against the document alone",
                measure=packing.packed,
            ),
            Check(
                name="alone",
                promise=1,
                what="another text in one document leaves all others the same to the last bit",
                measure=packing.alone,
            ),
            Check(
                name="moved",
                promise=1,
                what="a document further down in the row says the same, so queries and keys turn alike",
                measure=packing.moved,
            ),
            Check(
                name="split",
                promise=2,
                what="one step of eight rows in micro-batches of one, four and eight",
                measure=splitting.split,
            ),
            Check(
                name="order",
                promise=2,
                what="one step with its rows in other orders",
                measure=splitting.shuffled,
            ),
            *([rank_check(ranks)] if ranks else []),
            Check(
                name="resumed",
                promise=3,
                what="a stage cut off after several of its steps, against one that never was: bits and ledger",
                measure=resuming.resumed,
            ),
            Check(
                name="killed",
                promise=3,
                what="a process killed at random moments (--kills) and begun again, against one that never was",
                measure=partial(killing.killed, kills=kills),
                once=True,
            ),
            Check(
                name="export",
                promise=4,
                what="logits of the exported folder in a fresh process without Unspool",
                measure=partial(exports.exported, plain=plain),
            ),
            Check(
                name="tables",
                promise=4,
                what="cosines and sines up to the last position, against float64",
                measure=tables.tables,
            ),
            Check(
                name="chunked-loss",
                promise=5,
                what="loss and gradients in chunks, against all logits at once",
                measure=chunking.chunked_loss,
            ),
            *policies.policy_checks(),
        )
    }
