"""The promises of a training step that are read from its passes: documents, positions, labels, weights and RoPE."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.core.errors import UnspoolError
from unspool.models.loss import read_head
from unspool.models.rotary import USES_INPUT_LENGTH, head_bases
from unspool.rope.tables import frequencies, is_nested, rotary_dim, shape_of, tables
from unspool.verification.audits.captures import Pass, StepRun, without_dropout
from unspool.verification.audits.spans import Batch, Span, Spans, labels_of
from unspool.verification.audits.targets import Targets

# Tolerances of computing in fp32, and in bf16 or under autocast.
FINE, COARSE = 1e-3, 5e-2
NOT_CROSS_ENTROPY = "the loss is not a plain cross-entropy of tokens"
Document = tuple[int, int, Span]  # micro-batch, row and tokens
Status = Literal["kept", "broken", "not checked"]
PROMISES = {
    "isolation": "a change in one document changes nothing in another",
    "labels": "every position is trained to predict the next token",
    "first_token": "no document is trained to predict the first token of the next",
    "padding": "padding carries no loss",
    "coverage": "every label of every micro-batch carries loss",
    "token_mean": "the loss is the mean over the tokens of the whole step",
    "reported_loss": "the reported loss is that mean",
    "gradient": "the optimizer gets the gradient of that mean",
    "positions": "positions restart with every document, or continue, as claimed",
    "rope": "RoPE tables are those of the config",
    "sliding_window": "sliding-window layers keep their window, others see the whole document",
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
    """A step that was run on micro-batches, with their documents."""

    model: Any
    batches: Sequence[Batch]
    spans: Sequence[Spans]
    run: StepRun
    targets: Sequence[Targets]  # of each pass

    @property
    def is_aligned(self) -> bool:
        """Whether each pass computed a micro-batch as it is, in order; the last ones may be missing."""
        return len(self.run.passes) <= len(self.batches) and all(
            one.tokens is not None and one.tokens.shape == batch["input_ids"].shape
            for one, batch in zip(self.run.passes, self.batches, strict=False)
        )

    @property
    def tolerance(self) -> float:
        return COARSE if any(one.is_coarse for one in self.run.passes) else tolerance(self.model)

    @property
    def is_cross_entropy(self) -> bool:
        """Whether gradients are those of weighted token losses, and not of label smoothing or the like."""
        return max(each.residual for each in self.targets) < 5 * self.tolerance

    def documents(self) -> list[Document]:
        """Micro-batch, row and span of every document that a pass computed."""
        return [
            (number, row, span)
            for number, spans in enumerate(self.spans[: len(self.run.passes)])
            for row, of_row in enumerate(spans.rows)
            for span in of_row
        ]


def tolerance(model: Any) -> float:
    """Relative: far above rounding, far below the effect of any mistake."""
    return FINE if next(model.parameters()).dtype == torch.float32 else COARSE


def kept(promise: str, evidence: str) -> Verdict:
    return Verdict(promise=promise, status="kept", evidence=evidence)


def broken(promise: str, evidence: str) -> Verdict:
    return Verdict(promise=promise, status="broken", evidence=evidence)


def not_checked(promise: str, evidence: str) -> Verdict:
    return Verdict(promise=promise, status="not checked", evidence=evidence)


# Documents


def check_isolation(probe: Probe, again: StepRun, changed: Sequence[tuple[StepRun, set[Document]]]) -> Verdict:
    """`again` repeats the step; each of `changed` ran it with other tokens in some documents."""
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
    source = probe.spans[0].source
    if hurt:
        return broken(
            "isolation",
            f"other tokens in {_name(min(changed[0][1]))} and its like change {len(hurt)} of {seen} others: "
            f"{hurt[0]}; boundaries from {source}",
        )
    if not seen:
        return not_checked("isolation", f"no micro-batch holds two documents (boundaries from {source})")
    return kept(
        "isolation", f"{seen} documents beside changed ones, largest change {worst:.1e}; boundaries from {source}"
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
        return not_checked("positions", f"{type(probe.model).__name__} has no rotary module that gets positions")
    for each in probe.documents():
        number, row, (start, end) = each
        positions = _row(passes[number].positions, row)[start:end]
        first = int(positions[0])
        wanted = 0 if claim == "restart" else start
        is_padded = start > 0 and start == probe.spans[number].rows[row][0][0]
        if first != wanted and not is_padded:
            return broken("positions", f"{_name(each)} starts at position {first}, not at {wanted}")
        if bool((torch.diff(positions) < 1).any()):
            return broken("positions", f"{_name(each)}: positions do not increase")
    starts = sum(span[0] > 0 for _, _, span in probe.documents())
    if not starts:
        return not_checked("positions", "no row holds two documents, so positions cannot restart")
    return kept("positions", f"{starts} documents inside of rows, positions {claim}")


def _row(tensor: Tensor | None, row: int) -> Tensor:
    assert tensor is not None
    return tensor[row if len(tensor) > 1 else 0]


# Targets and weights


def check_labels(probe: Probe) -> Verdict:
    shifts = torch.cat([each.shift[each.active] for each in probe.targets])
    if not len(shifts):
        return broken("labels", "no position has a gradient: the step computed none")
    counts = {int(shift): int((shifts == shift).sum()) for shift in set(shifts.tolist())}
    wrong = {shift: count for shift, count in counts.items() if shift != 1}
    if not wrong:
        return kept("labels", f"{len(shifts)} positions, each trained on the next token")
    what = {
        0: "itself: labels are not shifted",
        2: "the token after the next: labels are shifted twice",
        3: "the third token ahead: labels are shifted three times",
        -1: "none of the tokens nearby",
    }
    shift, count = max(wrong.items(), key=lambda item: item[1])
    return broken("labels", f"{count} of {len(shifts)} positions are trained to predict {what[shift]}")


def check_first_token(probe: Probe) -> Verdict:
    found = [each for each in probe.documents() if _is_target(probe, each, at=each[2][0])]
    inside = [each for each in probe.documents() if each[2][0] > 0]
    if found:
        return broken(
            "first_token",
            f"{len(found)} of {len(inside)} documents are predicted from the one before, e.g. {_name(found[0])}",
        )
    if not inside:
        return not_checked("first_token", "no row holds two documents")
    return kept("first_token", f"{len(inside)} documents that follow another")


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
        return broken("padding", f"{counted} of {total} padding tokens are trained to be predicted")
    return (
        kept("padding", f"{total} padding tokens") if total else not_checked("padding", "the batches hold no padding")
    )


def check_coverage(probe: Probe) -> Verdict:
    for number, batch in enumerate(probe.batches):
        wanted = labels_of(batch)
        if wanted is None:
            return not_checked("coverage", "the batches hold no labels to compare with")
        found = int(probe.targets[number].active.sum()) if number < len(probe.targets) else 0
        count, which = int(wanted.sum()), f"micro-batch {number + 1} of {len(probe.batches)}"
        if count and not found:
            return broken("coverage", f"{which} is dropped: none of its {count} labels carries loss")
        if found < count:
            return broken("coverage", f"{which}: {count - found} of {count} labels carry no loss")
    return kept("coverage", f"all labels of {len(probe.batches)} micro-batches")


def check_token_mean(probe: Probe) -> Verdict:
    counted = [each for each in probe.targets if bool(each.active.any())]
    everything = torch.cat([each.weight[each.clear] for each in counted]) if counted else torch.empty(0)
    if not len(everything) or bool(everything.isnan().any()):
        return not_checked("token_mean", "the weights of tokens cannot be read; see labels")
    counts, means = [int(each.active.sum()) for each in counted], [each.mean_weight for each in counted]
    total = sum(count * mean for count, mean in zip(counts, means, strict=True))
    limit = probe.tolerance if probe.is_cross_entropy else 0.25
    if max(means) > min(means) * (1 + limit):
        products = [count * mean for count, mean in zip(counts, means, strict=True)]
        by_batch = max(products) < min(products) * (1 + limit)
        what = "a mean of the means of micro-batches" if by_batch else "not one mean"
        at = (means.index(max(means)), means.index(min(means)))
        return broken(
            "token_mean",
            f"{what}: a token of a micro-batch with {counts[at[0]]} labels weighs {max(means) / min(means):.3g} times "
            f"one of a micro-batch with {counts[at[1]]}",
        )
    if not probe.is_cross_entropy:
        return not_checked("token_mean", f"{NOT_CROSS_ENTROPY}; micro-batches weigh about the same")
    lowest, highest = float(everything.min()), float(everything.max())
    # Of single tokens, rounding takes away more digits than of all.
    if highest > lowest * (1 + max(0.05, 10 * probe.tolerance)):
        return broken("token_mean", f"tokens of one micro-batch weigh {lowest:.3g} to {highest:.3g}")
    if abs(total - 1) > probe.tolerance:
        return broken(
            "token_mean",
            f"the sum of the losses of {sum(counts)} tokens is divided by {sum(counts) / total:.6g}",
        )
    same = (
        ", all with as many labels, so a mean of means would be the same" if len(set(counts)) == 1 < len(counts) else ""
    )
    return kept("token_mean", f"{sum(counts)} tokens of {len(counts)} micro-batches weigh 1/{1 / means[0]:.6g}{same}")


def check_reported_loss(probe: Probe) -> Verdict:
    if probe.run.loss is None:
        return not_checked("reported_loss", "the step returns no loss")
    if not probe.is_cross_entropy:
        return not_checked("reported_loss", NOT_CROSS_ENTROPY)
    mean = float(torch.cat([each.loss[each.active] for each in probe.targets]).double().mean())
    text = f"reported {probe.run.loss:.6g}, mean over tokens {mean:.6g}"
    same = abs(probe.run.loss - mean) <= probe.tolerance * abs(mean)
    return kept("reported_loss", text) if same else broken("reported_loss", text)


def check_gradient(probe: Probe) -> Verdict:
    """Compare with the gradient of every document computed alone."""
    if probe.run.num_updates > 1:
        return broken("gradient", f"the optimizer was stepped {probe.run.num_updates} times in one step")
    if not probe.is_cross_entropy:
        return not_checked("gradient", NOT_CROSS_ENTROPY)
    if getattr(probe.model.config.get_text_config(), "output_router_logits", False):
        return not_checked("gradient", "the router's loss is part of it")
    with without_dropout(probe.model):
        wanted = _gradient_of_documents(probe)
    shared = [name for name in wanted if name in probe.run.grads]
    if not shared:
        return broken("gradient", "no parameter has a gradient at the end of the step or at the optimizer's update")
    mine = torch.cat([probe.run.grads[name].flatten().double() for name in shared])
    theirs = torch.cat([wanted[name].flatten().double() for name in shared])
    cosine = float(F.cosine_similarity(mine, theirs, dim=0))
    ratio = float(mine.norm() / theirs.norm().clamp(min=1e-30))
    text = f"against each document alone: cosine {cosine:.6f}, norm {ratio:.4g} times"
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
    """Compare the cosines and sines of every pass with those of the config; bases per head with their buffers."""
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
    text = f"cosines and sines differ by {worst:.1e} from rope_type {kind} of the config"
    coarse = cos.dtype != torch.float32
    return broken("rope", text) if worst > (2e-2 if coarse else 1e-3) else kept("rope", text)


def _wanted_tables(one: Pass, config: dict[str, Any], layer_type: str) -> tuple[Tensor, Tensor] | str:
    parameters = config.get("rope_parameters") or {}
    if is_nested(parameters):
        parameters = parameters.get(layer_type) or {}
    if parameters.get("rope_type") in USES_INPUT_LENGTH:
        return f"frequencies of {parameters['rope_type']} depend on the length of each input"
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
