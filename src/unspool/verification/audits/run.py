"""`unspool.audit`: probe a training step and check each promise."""

import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.data.packing.row import IGNORE
from unspool.models.load import load_model
from unspool.models.location import first_line
from unspool.verification.audits.captures import StepFn, run_step, unwrap
from unspool.verification.audits.layer_reach import check_sliding_window
from unspool.verification.audits.promises import (
    PROMISES,
    Document,
    Probe,
    Verdict,
    broken,
    check_coverage,
    check_first_token,
    check_gradient,
    check_isolation,
    check_labels,
    check_padding,
    check_positions,
    check_reported_loss,
    check_rope,
    check_token_mean,
    kept,
    not_checked,
    tolerance,
)
from unspool.verification.audits.setup_file import EXAMPLE, load_setup
from unspool.verification.audits.spans import (
    Batch,
    Documents,
    Spans,
    Special,
    find_spans,
    labels_of,
    look_packed,
    special_tokens,
    token_ids,
)
from unspool.verification.audits.targets import read_targets

# Micro-batches per probed step, and the number of micro-batches to choose them from.
MICRO_BATCHES = 4
READ_BATCHES = 16
# Tokens of the document whose logits are compared with the saved checkpoint.
CHECKPOINT_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Result of `audit`: one verdict per promise.

    Example:
        >>> import unspool
        >>> from unspool.verification.audits.promises import broken, kept
        >>> found = (kept("labels", "75 positions"), broken("isolation", "documents attend to each other"))
        >>> result = unspool.AuditResult(verdicts=found)
        >>> result.ok, result.broken
        (False, ('isolation',))
        >>> print(result["isolation"].evidence)
        documents attend to each other
    """

    verdicts: tuple[Verdict, ...]

    @property
    def ok(self) -> bool:
        return not self.broken

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the broken promises."""
        return tuple(each.promise for each in self.verdicts if each.status == "broken")

    def __getitem__(self, promise: str) -> Verdict:
        return next(each for each in self.verdicts if each.promise == promise)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "verdicts": [asdict(each) | {"title": each.title} for each in self.verdicts]}

    def __str__(self) -> str:
        width = max(map(len, PROMISES))
        lines = [f"{each.promise:<{width}}  {each.status:<11}  {each.evidence}" for each in self.verdicts]
        count = len(self.broken)
        lines.append(f"{count} of {len(self.verdicts)} promises broken" if count else "no promise broken")
        return "\n".join(lines)


def audit(
    model: Any,
    data: Any = None,
    step_fn: StepFn | None = None,
    *,
    attention: str = "intra_document",
    positions: str | None = None,
    documents: Documents | None = None,
    examples: Iterable[Any] | None = None,
    save_fn: Callable[[str], Any] | None = None,
    context_parallel: StepFn | None = None,
) -> AuditResult:
    """Check a training setup by probing one of its optimizer steps.

    The step runs a few times where the model is (CPU or GPU), on real batches and on batches with replaced tokens in
    some documents. Weights are restored after each run. Files are written only to a temporary folder.

    Args:
        model: A causal language model of `transformers`, or a `transformers.Trainer` (or a subclass such as TRL's
            `SFTTrainer`), which brings its own data and step.
        data: A DataLoader of batches, each a dict with `input_ids` [rows, tokens], or of lists of such micro-batches.
            Or a collator; then also pass `examples`.
        step_fn: `step_fn(model, micro_batches)` computes the gradients of one optimizer step. It may update the
            weights, and may return the loss that you log.
        attention: Claimed attention: `intra_document`, or `full` if documents of a row attend to each other.
        positions: Claimed position ids: `restart` (the default) or `continue` (the default with full attention).
        documents: Function that returns the document lengths of each row of a batch. Needed if the batch has none of
            `position_ids`, `cu_seq_lens_q`, `seq_idx` or end-of-text tokens.
        examples: Examples for the collator, two per micro-batch.
        save_fn: Saves the model to a folder, like your code does. Default: `model.save_pretrained`.
        context_parallel: The same step under context parallelism. It is compared with `step_fn`.

    Returns:
        A verdict for each promise: kept, broken or not checked, with the evidence.

    Raises:
        ConfigError: The setup cannot be probed.

    Example:
        >>> import unspool
        >>> from torch.utils.data import DataLoader
        >>> model, tokenizer = unspool.load("asset:tiny-base", device="cpu")
        >>> rows = [{"input_ids": list(range(9 * n, 9 * n + 9)), "seq_lengths": [4, 5]} for n in range(4)]
        >>> def step(model, micro_batches):
        ...     return sum(backward(model(**batch).loss) for batch in micro_batches)
        >>> def backward(loss):
        ...     loss.backward()
        ...     return loss.item()
        >>> loader = DataLoader(rows, batch_size=4, collate_fn=unspool.Collator(model).step)
        >>> unspool.audit(model, loader, step).broken
        ()
    """
    if attention not in ("intra_document", "full"):
        raise ConfigError(f"audit: attention {attention!r} is not known; use intra_document or full.")
    positions = positions or ("restart" if attention == "intra_document" else "continue")
    if positions not in ("restart", "continue"):
        raise ConfigError(f"audit: positions {positions!r} is not known; use restart or continue.")
    accumulation = MICRO_BATCHES
    if hasattr(model, "get_batch_samples") and hasattr(model, "training_step"):
        trainer, model = model, model.model
        data = trainer.get_train_dataloader() if data is None else data
        step_fn = step_fn or trainer_step(trainer)
        save_fn = save_fn or trainer.save_model
        accumulation = max(2, trainer.args.gradient_accumulation_steps)
    if data is None or step_fn is None:
        raise ConfigError("audit: pass a model, its data and a step_fn, or a transformers.Trainer.")
    wrapped, model = model, unwrap(model)
    if wrapped is not model:
        step_fn, context_parallel = _with(wrapped, step_fn), context_parallel and _with(wrapped, context_parallel)
    special, found = special_tokens(model), _read(data, examples)
    packed = attention == "intra_document" and look_packed(found, special)
    batches, is_thinned = _choose(found, accumulation)
    spans = [find_spans(batch, special, documents=documents, packed=packed) for batch in batches]
    verdicts = _probe_step(model, batches, spans, step_fn, claimed_positions=positions, is_thinned=is_thinned)
    verdicts += [
        check_sliding_window(model, step_fn, batches, spans),
        check_checkpoint(model, batches, spans, save_fn or wrapped.save_pretrained),
        check_context_parallel(model, batches, step_fn, context_parallel),
    ]
    return AuditResult(verdicts=tuple(verdicts))


def _with(wrapped: Any, step_fn: StepFn) -> StepFn:
    return lambda _, batches: step_fn(wrapped, batches)


def audit_file(target: str | None, *, attention: str | None = None, positions: str | None = None) -> AuditResult:
    """Audit the setup that `target` (FILE:FUNCTION) returns. Default: Unspool's collator in a plain loop."""
    claims = {"attention": attention, "positions": positions}
    setup = load_setup(target or EXAMPLE) | {name: value for name, value in claims.items() if value is not None}
    known = inspect.signature(audit).parameters
    if unknown := [name for name in setup if name not in known]:
        raise ConfigError(f"audit {target}: returns the unknown argument {unknown[0]!r}; use {', '.join(known)}.")
    return audit(**setup)


def trainer_step(trainer: Any) -> StepFn:
    """One step of a `transformers.Trainer`, up to the optimizer update."""

    def step(model: Any, batches: list[Any]) -> float:
        samples, num_items = trainer.get_batch_samples(iter(batches), len(batches), trainer.args.device)
        trainer.current_gradient_accumulation_steps = len(samples)
        return sum(float(trainer.training_step(model, sample, num_items)) for sample in samples)

    return step


# Data


def _read(data: Any, examples: Iterable[Any] | None) -> list[Any]:
    if examples is not None:
        if not callable(data):
            raise ConfigError("audit: examples= requires a collator as data.")
        chosen = list(islice(examples, 2 * READ_BATCHES))
        return [data(chosen[at : at + 2]) for at in range(0, len(chosen), 2)]
    if not isinstance(data, Iterable):
        raise ConfigError("audit: a collator requires examples=; or pass a DataLoader.")
    found: list[Any] = []
    for item in islice(data, READ_BATCHES):
        if isinstance(item, list | tuple) and item and isinstance(item[0], Mapping):
            return list(item)  # the micro-batches of one step
        found.append(item)
    return found


def _choose(batches: list[Any], count: int) -> tuple[list[Any], bool]:
    """Choose micro-batches with different label counts, because equal counts would hide a mean of means.

    Also return whether labels were removed.
    """
    if not batches:
        raise ConfigError("audit: the data yields no batch.")
    for batch in batches:
        token_ids(batch)
    if len(batches) <= count:
        return _thinned(batches)
    sizes = [_num_labels(batch) for batch in batches]
    order = sorted(range(len(batches)), key=lambda at: sizes[at])
    # Half with the fewest labels, half with the most, in data order.
    few, many = order[: count // 2], order[len(order) - (count - count // 2) :]
    return _thinned([batches[at] for at in sorted(few + many)])


def _num_labels(batch: Batch) -> int:
    labels = labels_of(batch)
    return 0 if labels is None else int(labels.sum())


def _thinned(batches: list[Any]) -> tuple[list[Any], bool]:
    """If all micro-batches have equally many labels, remove every other label of the first one."""
    if len(batches) < 2 or len({_num_labels(batch) for batch in batches}) > 1:
        return batches, False
    # Then a count derived from the labels would be wrong.
    known = {"input_ids", "labels", "shift_labels", "attention_mask", "position_ids"}
    if any(_is_count(value) for name, value in batches[0].items() if name not in known and "max_length" not in name):
        return batches, False
    first = dict(batches[0])
    for name, offset in (("labels", 1), ("shift_labels", 0)):
        if isinstance(first.get(name), Tensor):
            first[name] = first[name].clone()
            first[name][:, offset::2] = IGNORE
    return [first, *batches[1:]], _num_labels(first) < _num_labels(batches[0])


def _is_count(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number or (isinstance(value, Tensor) and value.numel() == 1)


# Probes


def _probe_step(
    model: Any,
    batches: Sequence[Batch],
    spans: Sequence[Spans],
    step_fn: StepFn,
    *,
    claimed_positions: str,
    is_thinned: bool,
) -> list[Verdict]:
    """Run the step twice unchanged, and with tokens replaced in some documents."""
    run = run_step(model, step_fn, batches, probe="unchanged micro-batches")
    if not run.passes:
        raise ConfigError("audit: step_fn ran no forward pass of the model with gradients; it must train this model.")
    probe = Probe(
        model=model,
        batches=batches,
        spans=spans,
        run=run,
        targets=[read_targets(model, one, labels_of(batch)) for one, batch in zip(run.passes, batches, strict=False)],
        is_thinned=is_thinned,
    )
    if not probe.is_aligned:
        raise ConfigError(
            "audit: the model does not get each micro-batch unchanged in one forward pass (micro-batches are split, "
            "joined or padded on the way); pass a step_fn that forwards them unchanged."
        )
    changed = []
    for which in ("first", "last"):
        others, replaced = _replace(batches, spans, special_tokens(model), which=which)
        if replaced:
            changed.append((run_step(model, step_fn, others, probe=f"{which} documents replaced"), replaced))
    verdicts = [
        check_isolation(probe, run_step(model, step_fn, batches, probe="unchanged micro-batches again"), changed),
        check_labels(probe),
        check_first_token(probe),
        check_padding(probe),
        check_coverage(probe),
        check_token_mean(probe),
    ]
    # The expected loss and gradient follow from these.
    reason = ", ".join(each.promise for each in verdicts if each.status == "broken")
    for promise, check in (("reported_loss", check_reported_loss), ("gradient", check_gradient)):
        verdicts.append(not_checked(promise, f"see {reason}") if reason else check(probe))
    return [*verdicts, check_positions(probe, claimed_positions), check_rope(probe)]


def _replace(
    batches: Sequence[Batch], spans: Sequence[Spans], special: Special, *, which: str
) -> tuple[list[Batch], set[Document]]:
    """Replace the tokens of the first or last document in every row with several documents."""
    found: list[Batch] = []
    replaced: set[Document] = set()
    for number, (batch, of_batch) in enumerate(zip(batches, spans, strict=True)):
        ids = token_ids(batch).clone()
        num_documents = of_batch.count
        for row, of_row in enumerate(of_batch.rows):
            # Do not replace the only row: at least one document must stay unchanged.
            if not of_row or num_documents < 2 or (len(of_row) < 2 and row > 0):
                continue
            start, end = span = of_row[0 if which == "first" else -1]
            if _replace_tokens(ids[row], start, end, special):
                replaced.add((number, row, span))
        found.append(dict(batch) | {"input_ids": ids})
    return found, replaced


def _replace_tokens(ids: Tensor, start: int, end: int, special: Special) -> bool:
    """Reverse a document's tokens, except special tokens. Returns whether any token changed."""
    kept_ids = [*special.eos, *([] if special.pad is None else [special.pad])]
    free = [at for at in range(start, end) if int(ids[at]) not in kept_ids]
    # Keep the first token, which may mark the start of a text.
    free = free[1:] if len(free) > 2 else free
    before = ids[free].clone()
    ids[free] = before.flip(0)
    return not torch.equal(before, ids[free])


def check_checkpoint(
    model: Any, batches: Sequence[Batch], spans: Sequence[Spans], save_fn: Callable[[str], Any]
) -> Verdict:
    """Save and reload the model, and compare the logits of a document."""
    documents = [
        batch["input_ids"][row : row + 1, start:end]
        for batch, of_batch in zip(batches, spans, strict=True)
        for row, of_row in enumerate(of_batch.rows)
        for start, end in of_row
    ]
    ids = max(documents, key=lambda tokens: tokens.shape[1])[:, :CHECKPOINT_TOKENS]
    if hasattr(model, "peft_config") and save_fn == model.save_pretrained:
        return not_checked("checkpoint", "pass save_fn=, which saves the model with merged adapters")
    ids = ids.to(next(model.parameters()).device)
    other: Any = None
    mine, theirs = _logits(model, ids), None
    with tempfile.TemporaryDirectory() as own, _no_progress_bars():
        folder = _of_first_rank(own)
        try:
            save_fn(folder)
            if _rank() == 0:
                other = _load(model, folder)
                theirs = _logits(other, ids)
        except Exception as error:  # any type: the user's code saves the model
            return broken("checkpoint", f"could not be saved and loaded: {first_line(error)}")
    if theirs is None:
        return not_checked("checkpoint", "only rank 0 checks this")
    change = float((mine - theirs).norm() / mine.norm())
    text = f"logits of {ids.shape[1]} tokens differ by {change:.1e} after saving and loading"
    if change <= tolerance(model):
        return kept("checkpoint", text)
    before, after = (getattr(each.config.get_text_config(), "rope_parameters", None) for each in (model, other))
    why = f"; rope_parameters {before} became {after}" if before != after else ""
    return broken("checkpoint", text + why)


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    was_training = model.training
    found: Tensor = model.eval()(input_ids=ids, use_cache=False).logits.float()
    model.train(was_training)
    return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _of_first_rank(folder: str) -> str:
    """Folder name of rank 0. All ranks save to one folder, because some write nothing or only a part."""
    found = [folder]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _load(model: Any, folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    if getattr(model.config, "head_bases", None) is not None:
        return load_model(folder, device=device, dtype=dtype)
    implementation = model.config._attn_implementation
    return AutoModelForCausalLM.from_pretrained(
        Path(folder), dtype=dtype, attn_implementation=implementation, local_files_only=True
    ).to(device)


def check_context_parallel(model: Any, batches: Sequence[Batch], plain: StepFn, parallel: StepFn | None) -> Verdict:
    if parallel is None:
        return not_checked("context_parallel", "pass context_parallel=, the same step under context parallelism")
    run = run_step(model, plain, batches, probe="unchanged micro-batches again")
    other = run_step(model, parallel, batches, probe="context parallelism")
    shared = [name for name in run.grads if name in other.grads]
    mine, theirs = (torch.cat([each.grads[name].flatten().double() for name in shared]) for each in (run, other))
    error = float((mine - theirs).norm() / mine.norm())
    loss = "" if run.loss is None or other.loss is None else f"loss {run.loss:.6g} and {other.loss:.6g}, "
    text = f"{loss}gradients differ by {error:.1e}"
    same_loss = run.loss is None or other.loss is None or abs(run.loss - other.loss) <= 1e-3 * abs(run.loss)
    return kept("context_parallel", text) if same_loss and error <= 1e-2 else broken("context_parallel", text)
