"""Promises checked from a step's forward passes: documents, positions, labels, weights and RoPE."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.core.errors import UnspoolError
from unspool.models.loss import read_head
from unspool.models.rotary import head_bases, uses_input_length
from unspool.rope.tables import frequencies, is_nested, rotary_dim, shape_of, tables
from unspool.verification.audits.captures import Pass, StepRun, without_dropout
from unspool.verification.audits.spans import Batch, Span, Spans, labels_of, name_sources
from unspool.verification.audits.targets import Targets

# Tolerances for fp32, and for bf16 or autocast.
FINE, COARSE = 1e-3, 5e-2
NOT_CROSS_ENTROPY = "the loss is not plain token cross-entropy"
THINNED = (
    "; the audit removed every other label of micro-batch 1, because all micro-batches had equally many; "
    "loss / len(micro_batches) is the token mean only for equal counts"
)
Document = tuple[int, int, Span]  # micro-batch, row and tokens
Status = Literal["kept", "broken", "not checked"]
PROMISES = {
    "isolation": "changing one document changes no other document",
    "labels": "every position is trained to predict the next token",
    "first_token": "no document is trained to predict the next document's first token",
    "padding": "padding tokens have no loss",
    "coverage": "every label of every micro-batch contributes to the loss",
    "token_mean": "the loss is the mean over all tokens of the step",
    "reported_loss": "the reported loss is the mean over all tokens of the step",
    "gradient": "the optimizer gets the gradient of that mean loss",
    "positions": "positions restart at every document, or continue, as claimed",
    "rope": "RoPE tables match the config",
    "sliding_window": "sliding-window layers use their window; other layers see the whole document",
    "checkpoint": "the saved checkpoint gives the same logits",
    "context_parallel": "context parallelism changes neither loss nor gradient",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    promise: str  # a key of PROMISES
    status: Status
    evidence: str

    @property
    def title(self) -> str:
        return PROMISES[self.promise]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A recorded step, with its micro-batches and their documents."""

    model: Any
    batches: Sequence[Batch]
    spans: Sequence[Spans]
    run: StepRun
    targets: Sequence[Targets]  # of each pass
    is_thinned: bool = False  # labels of the first micro-batch were removed

    @property
    def is_aligned(self) -> bool:
        """True if each pass computed one unchanged micro-batch, in order. The last ones may be missing."""
        return len(self.run.passes) <= len(self.batches) and all(
            one.tokens is not None and one.tokens.shape == batch["input_ids"].shape
            for one, batch in zip(self.run.passes, self.batches, strict=False)
        )

    @property
    def tolerance(self) -> float:
        return COARSE if any(one.is_coarse for one in self.run.passes) else tolerance(self.model)

    @property
    def is_cross_entropy(self) -> bool:
        """True if gradients come from weighted token losses (not from label smoothing, for example)."""
        return max(each.residual for each in self.targets) < 5 * self.tolerance

    def documents(self) -> list[Document]:
        """(micro-batch, row, span) of every computed document."""
        return [
            (number, row, span)
            for number, spans in enumerate(self.spans[: len(self.run.passes)])
            for row, of_row in enumerate(spans.rows)
            for span in of_row
        ]


def tolerance(model: Any) -> float:
    """Relative tolerance: far above rounding, far below the effect of a mistake."""
    return FINE if next(model.parameters()).dtype == torch.float32 else COARSE


def kept(promise: str, evidence: str) -> Verdict:
    return Verdict(promise=promise, status="kept", evidence=evidence)


def broken(promise: str, evidence: str) -> Verdict:
    return Verdict(promise=promise, status="broken", evidence=evidence)


def not_checked(promise: str, evidence: str) -> Verdict:
    return Verdict(promise=promise, status="not checked", evidence=evidence)


# Documents


def check_isolation(probe: Probe, again: StepRun, changed: Sequence[tuple[StepRun, set[Document]]]) -> Verdict:
    """`again` repeats the step. Each run in `changed` replaced the tokens of some documents."""
    others = probe.documents()
    noise = max((_change(probe.run, again, each)[1] for each in others), default=0.0)
    limit = max(10 * noise, 1e-5)
    worst, hurt, seen = 0.0, [], 0
    for run, replaced in changed:
        own = max(_change(probe.run, run, each)[1] for each in replaced)
        for each in others:
            if each in replaced:
                continue
            seen += 1
            what, found = _change(probe.run, run, each)
            if found > limit * max(own, 1e-3):
                hurt.append(f"{_name(each)} ({what} by {found:.1%})")
            worst = max(worst, found)
    source = name_sources(probe.spans)
    if hurt:
        return broken(
            "isolation",
            f"replacing tokens of {_name(min(changed[0][1]))} and similar ones changes {len(hurt)} of {seen} other "
            "documents: "
            f"{hurt[0]}; document boundaries from {source}",
        )
    if not seen:
        return not_checked("isolation", f"no micro-batch has two documents (document boundaries from {source})")
    return kept(
        "isolation", f"{seen} unchanged documents, largest change {worst:.1e}; document boundaries from {source}"
    )


def _change(before: StepRun, after: StepRun, document: Document) -> tuple[str, float]:
    number, row, (start, end) = document
    found = []
    for what in ("hidden", "hidden_grad"):
        if number >= len(after.passes):
            continue
        old, new = getattr(before.passes[number], what), getattr(after.passes[number], what)
        if old is None or new is None:
            continue
        old, new = old[row, start:end].float(), new[row, start:end].float()
        size = float(old.norm())
        name = "hidden states" if what == "hidden" else "gradient"
        found.append((float((new - old).norm()) / size if size else float(new.norm() > 0), name))
    change, what = max(found, default=(0.0, "hidden states"))
    return what, change


def _name(document: Document) -> str:
    number, row, (start, end) = document
    return f"micro-batch {number + 1}, row {row + 1}, tokens {start} to {end - 1}"


def check_positions(probe: Probe, claim: str) -> Verdict:
    passes = [one for one in probe.run.passes if one.positions is not None]
    if len(passes) < len(probe.run.passes):
        return not_checked("positions", f"{type(probe.model).__name__} has no rotary module with positions as input")
    for each in probe.documents():
        number, row, (start, end) = each
        positions = _row(passes[number].positions, row)[start:end]
        first = int(positions[0])
        wanted = 0 if claim == "restart" else start
        is_padded = start > 0 and start == probe.spans[number].rows[row][0][0]
        if first != wanted and not is_padded:
            source = name_sources(probe.spans)
            what = f"starts at position {first} instead of {wanted}; document boundaries from {source}"
            return broken("positions", f"{_name(each)} {what}")
        if bool((torch.diff(positions) < 1).any()):
            return broken("positions", f"{_name(each)}: positions do not increase")
    starts = sum(span[0] > 0 for _, _, span in probe.documents())
    if not starts:
        return not_checked("positions", "no row has two documents, so positions cannot restart")
    return kept("positions", f"{starts} documents start inside a row; positions {claim}")


def _row(tensor: Tensor | None, row: int) -> Tensor:
    assert tensor is not None
    return tensor[row if len(tensor) > 1 else 0]


# Targets and weights


def check_labels(probe: Probe) -> Verdict:
    shifts = torch.cat([each.shift[each.active] for each in probe.targets])
    if not len(shifts):
        return broken("labels", "no position has a gradient: the step computed no gradients")
    counts = {int(shift): int((shifts == shift).sum()) for shift in set(shifts.tolist())}
    wrong = {shift: count for shift, count in counts.items() if shift != 1}
    if not wrong:
        return kept("labels", f"{len(shifts)} positions, each trained on the next token")
    what = {
        0: "itself: labels are not shifted",
        2: "the token after the next: labels are shifted twice",
        3: "the third token ahead: labels are shifted three times",
        -1: "none of the nearby tokens",
    }
    shift, count = max(wrong.items(), key=lambda item: item[1])
    return broken("labels", f"{count} of {len(shifts)} positions predict {what[shift]}")


def check_first_token(probe: Probe) -> Verdict:
    found = [each for each in probe.documents() if _is_target(probe, each, at=each[2][0])]
    inside = [each for each in probe.documents() if each[2][0] > 0]
    if found:
        return broken(
            "first_token",
            f"{len(found)} of {len(inside)} first tokens are targets of the previous document, e.g. {_name(found[0])}; "
            f"document boundaries from {name_sources(probe.spans)}",
        )
    if not inside:
        return not_checked("first_token", "no row has two documents")
    return kept("first_token", f"{len(inside)} documents follow another document")


def _is_target(probe: Probe, document: Document, *, at: int) -> bool:
    number, row, _ = document
    targets = probe.targets[number]
    return any(
        bool(targets.active[row, at - ahead]) and int(targets.shift[row, at - ahead]) == ahead
        for ahead in (1, 2, 3)
        if at - ahead >= 0
    )


def check_padding(probe: Probe) -> Verdict:
    total = counted = 0
    for number, targets in enumerate(probe.targets):
        for row, spans in enumerate(probe.spans[number].rows):
            inside = {at for start, end in spans for at in range(start, end)}
            outside = [at for at in range(targets.active.shape[1]) if at not in inside]
            total += len(outside)
            counted += sum(_is_target(probe, (number, row, (0, 0)), at=at) for at in outside)
    if counted:
        return broken("padding", f"{counted} of {total} padding tokens are prediction targets")
    return (
        kept("padding", f"{total} padding tokens") if total else not_checked("padding", "the batches have no padding")
    )


def check_coverage(probe: Probe) -> Verdict:
    for number, batch in enumerate(probe.batches):
        wanted = labels_of(batch)
        if wanted is None:
            return not_checked("coverage", "the batches have no labels")
        found = int(probe.targets[number].active.sum()) if number < len(probe.targets) else 0
        count, which = int(wanted.sum()), f"micro-batch {number + 1} of {len(probe.batches)}"
        if count and not found:
            return broken("coverage", f"{which} is dropped: none of its {count} labels contributes to the loss")
        if found < count:
            return broken("coverage", f"{which}: {count - found} of {count} labels do not contribute to the loss")
    return kept("coverage", f"all labels of {len(probe.batches)} micro-batches")


def check_token_mean(probe: Probe) -> Verdict:
    counted = [each for each in probe.targets if bool(each.active.any())]
    everything = torch.cat([each.weight[each.clear] for each in counted]) if counted else torch.empty(0)
    if not len(everything) or bool(everything.isnan().any()):
        return not_checked("token_mean", "token weights cannot be measured; see labels")
    counts, means = [int(each.active.sum()) for each in counted], [each.mean_weight for each in counted]
    total = sum(count * mean for count, mean in zip(counts, means, strict=True))
    limit = probe.tolerance if probe.is_cross_entropy else 0.25
    if max(means) > min(means) * (1 + limit):
        products = [count * mean for count, mean in zip(counts, means, strict=True)]
        by_batch = max(products) < min(products) * (1 + limit)
        what = "a mean of micro-batch means" if by_batch else "not a single mean"
        at = (means.index(max(means)), means.index(min(means)))
        return broken(
            "token_mean",
            f"{what}: a token in a micro-batch with {counts[at[0]]} labels has {max(means) / min(means):.3g} times the "
            f"weight of a token in one with {counts[at[1]]}{THINNED if probe.is_thinned else ''}",
        )
    if not probe.is_cross_entropy:
        return not_checked("token_mean", f"{NOT_CROSS_ENTROPY}; micro-batches have about equal weight")
    lowest, highest = float(everything.min()), float(everything.max())
    # Weights of single tokens have larger rounding errors than their mean.
    if highest > lowest * (1 + max(0.05, 10 * probe.tolerance)):
        return broken("token_mean", f"token weights in one micro-batch range from {lowest:.3g} to {highest:.3g}")
    if abs(total - 1) > probe.tolerance:
        return broken(
            "token_mean",
            f"the summed loss of {sum(counts)} tokens is divided by {sum(counts) / total:.6g}",
        )
    same = (
        "; all have equally many labels, so a mean of means would be equal"
        if len(set(counts)) == 1 < len(counts)
        else ""
    )
    return kept(
        "token_mean", f"{sum(counts)} tokens of {len(counts)} micro-batches have weight 1/{1 / means[0]:.6g}{same}"
    )


def check_reported_loss(probe: Probe) -> Verdict:
    if probe.run.loss is None:
        return not_checked("reported_loss", "the step returns no loss")
    if not probe.is_cross_entropy:
        return not_checked("reported_loss", NOT_CROSS_ENTROPY)
    mean = float(torch.cat([each.loss[each.active] for each in probe.targets]).double().mean())
    text = f"reported {probe.run.loss:.6g}, token mean {mean:.6g}"
    same = abs(probe.run.loss - mean) <= probe.tolerance * abs(mean)
    return kept("reported_loss", text) if same else broken("reported_loss", text)


def check_gradient(probe: Probe) -> Verdict:
    """Compare with the sum of the gradients of all documents, each computed alone."""
    if probe.run.num_updates > 1:
        return broken("gradient", f"the optimizer updated weights {probe.run.num_updates} times in one step")
    if not probe.is_cross_entropy:
        return not_checked("gradient", NOT_CROSS_ENTROPY)
    if getattr(probe.model.config.get_text_config(), "output_router_logits", False):
        return not_checked("gradient", "the gradient includes the router's loss")
    with without_dropout(probe.model):
        wanted = _gradient_of_documents(probe)
    shared = [name for name in wanted if name in probe.run.grads]
    if not shared:
        return broken("gradient", "no parameter has a gradient at the optimizer update or at the end of the step")
    mine = torch.cat([probe.run.grads[name].flatten().double() for name in shared])
    theirs = torch.cat([wanted[name].flatten().double() for name in shared])
    cosine = float(F.cosine_similarity(mine, theirs, dim=0))
    ratio = float(mine.norm() / theirs.norm().clamp(min=1e-30))
    text = f"vs. each document alone: cosine {cosine:.6f}, norm ratio {ratio:.4g}"
    if cosine < 1 - probe.tolerance or ratio > 1 + probe.tolerance:
        return broken("gradient", text)
    return kept("gradient", text + (" (clipped?)" if ratio < 1 - probe.tolerance else ""))


def _gradient_of_documents(probe: Probe) -> dict[str, Tensor]:
    model, head = probe.model, read_head(probe.model)
    num_valid = sum(int(each.active.sum()) for each in probe.targets)
    model.zero_grad(set_to_none=True)
    for number, row, (start, end) in probe.documents():
        one, active = probe.run.passes[number], probe.targets[number].active[row, start : end - 1]
        if not bool(active.any()):
            continue
        ids = one.tokens[row : row + 1, start:end]
        inputs: dict[str, Any] = {}
        if one.positions is not None:
            positions = _row(one.positions, row)[start:end]
            if bool((torch.diff(positions) != 1).any()):
                inputs["position_ids"] = positions[None]
        hidden = model.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state[0, :-1]
        losses = F.cross_entropy(head.logits(hidden[active]), ids[0, 1:][active], reduction="sum")
        (losses / num_valid).backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


# RoPE


def check_rope(probe: Probe) -> Verdict:
    """Compare cosines and sines of every pass with the config. For bases per head, compare the buffers."""
    model, config = probe.model, probe.model.config.get_text_config().to_dict()
    if head_bases(model) is not None:
        return _check_head_bases(model, config)
    worst, checked = 0.0, 0
    for one in probe.run.passes:
        for layer_type, (cos, sin) in one.tables.items():
            wanted = _wanted_tables(one, config, layer_type)
            if isinstance(wanted, str):
                return not_checked("rope", wanted)
            for found, table in zip((cos, sin), wanted, strict=True):
                half = found[..., : table.shape[-1]].double().cpu()
                worst = max(worst, float((half - table).abs().max()))
                checked += 1
    if not checked:
        return not_checked("rope", f"{type(model).__name__} has no rotary module that returns cosines and sines")
    kind = (config.get("rope_parameters") or {}).get("rope_type", "by layer type")
    text = f"cosines and sines differ by {worst:.1e} from the config's rope_type {kind}"
    coarse = cos.dtype != torch.float32
    return broken("rope", text) if worst > (2e-2 if coarse else 1e-3) else kept("rope", text)


def _wanted_tables(one: Pass, config: dict[str, Any], layer_type: str) -> tuple[Tensor, Tensor] | str:
    parameters = config.get("rope_parameters") or {}
    if is_nested(parameters):
        parameters = parameters.get(layer_type) or {}
    if uses_input_length(parameters):
        return f"frequencies of {parameters['rope_type']} depend on the input length"
    if one.positions is None or not parameters:
        return "the config has no rope_parameters"
    try:
        shape_of(config)
        found = tables(parameters, rotary_dim(config, parameters), max_positions=config["max_position_embeddings"])
    except (UnspoolError, KeyError) as error:
        return str(error)
    angles = one.positions.double().cpu()[..., None] * torch.from_numpy(found.inv_freq).double()
    return angles.cos() * found.attention_factor, angles.sin() * found.attention_factor


def _check_head_bases(model: Any, config: dict[str, Any]) -> Verdict:
    bases = np.atleast_2d(np.asarray(config.get("head_bases") or head_bases(model), dtype=np.float64))
    wanted = np.broadcast_to(bases, (len(model.base_model.layers), bases.shape[-1]))
    dim = shape_of(config).rotary_dim
    worst = max(
        float((layer.self_attn.head_inv_freq.cpu() / torch.from_numpy(frequencies(of_layer, dim)) - 1).abs().max())
        for layer, of_layer in zip(model.base_model.layers, wanted, strict=True)
    )
    text = f"frequencies of {bases.shape[-1]} heads (HARPE) differ by {worst:.1e} from the config's bases"
    return broken("rope", text) if worst > 1e-3 else kept("rope", text)
