"""All that is asked of 2 and of 4 ranks, by name: computed in one go, since starting ranks costs more than they do."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig

from factory import build_model
from unspool.data.packing.row import IGNORE
from unspool.models.attention.interface import attend
from unspool.models.checks import attention_of, layers_of
from unspool.models.memory.policy import MemoryPolicy
from unspool.training.batch import Batch, split_batch
from unspool.training.parallel import fsdp, ulysses
from unspool.training.parallel.apply import Exchange, apply_sequence, parallelize
from unspool.training.parallel.config import ParallelConfig
from unspool.training.parallel.dtensor import full_tensor
from unspool.training.parallel.fsdp import apply_fsdp
from unspool.training.parallel.mesh import AXES, build_mesh, rank_coords

from .cases import BASES, FULL, MORE, Case, same_bits, this_rank
from .steps import step_jobs

KEEP = MemoryPolicy(activation_checkpointing="keep-attention", offload=True, mlp_tiles=10)
TOGETHER = MemoryPolicy(activation_checkpointing="full", layers_per_checkpoint=2)
PARTS = MemoryPolicy(activation_checkpointing="full", attention_heads_at_once=2)
# Divides among no number of ranks, so that the last one has fewer rows.
LOADED_VOCAB = 301
ULYSSES, RING = {"ulysses": 2}, {"ring": 2}

CASES: dict[str, Case] = {
    "fsdp 2": Case(world=2, docs=MORE, rows_per_batch=2),
    "fsdp 2, full": Case(world=2, docs=FULL),
    "fsdp 2, tied, some frozen": Case(world=2, family="llama-tied", frozen="mlp"),
    "fsdp 2, layers together, host memory": Case(world=2, memory=TOGETHER, parallel={"offload": True}),
    "replicate 2": Case(world=2, parallel={"replicate": 2}),
    "ulysses 2, full": Case(world=2, parallel=ULYSSES, docs=FULL),
    "ulysses 2, more KV heads": Case(world=2, parallel=ULYSSES, family="llama-mha", memory=PARTS),
    "ulysses 2, one KV head": Case(world=2, parallel=ULYSSES, family="llama-mqa"),
    "ulysses 2, a base per head": Case(world=2, parallel=ULYSSES, bases=BASES, memory=PARTS),
    "ulysses 2, SFT mask, rows": Case(world=2, parallel=ULYSSES, mask=0.7, docs=MORE, rows_per_batch=4),
    "ulysses 2, windows": Case(world=2, parallel=ULYSSES, family="mistral", changes={"sliding_window": 7}),
    "ulysses 2, capped scores": Case(world=2, parallel=ULYSSES, family="Gemma2", changes={"head_dim": 8}),
    "ulysses 2, recomputed": Case(world=2, parallel=ULYSSES, memory=KEEP),
    "ring 2": Case(world=2, parallel=RING, docs=FULL),
    "ring 2, a base per head, recomputed": Case(world=2, parallel=RING, docs=FULL, bases=BASES, memory=KEEP),
    "ring 2, SFT mask": Case(world=2, parallel=RING, docs=FULL, mask=0.7),
    "fsdp 4": Case(world=4, docs=MORE),
    "replicate 2, shard 2": Case(world=4, parallel={"replicate": 2}, docs=MORE),
    "ulysses 4, fewer KV heads": Case(world=4, parallel={"ulysses": 4}, memory=KEEP),
    "ulysses 4, MHA, SFT mask": Case(world=4, parallel={"ulysses": 4}, family="llama-mha", mask=0.7),
    "ulysses 4, full, a base per head": Case(world=4, parallel={"ulysses": 4}, docs=FULL, bases=BASES),
    "ulysses 2, shard 2": Case(world=4, parallel=ULYSSES),
    "ulysses 2, replicate 2": Case(world=4, parallel={"ulysses": 2, "replicate": 2}, docs=FULL),
    "ulysses 2, ring 2": Case(world=4, parallel=ULYSSES | RING, docs=FULL, memory=TOGETHER),
    "ring 4": Case(world=4, parallel={"ring": 4}, docs=FULL),
}


# Broken on purpose


def _cut_documents(batch: Batch, rank: int, degree: int, *, ring: int) -> Batch:
    """As ranks would see documents that do not know of each other."""
    part = split_batch(batch, rank, degree, ring=ring)
    first, last = rank * len(part.tokens), (rank + 1) * len(part.tokens)
    ends = torch.tensor(part.doc_lens).cumsum(0).clamp(first, last)
    lens = torch.diff(ends, prepend=torch.tensor([first]))
    return replace(part, doc_lens=tuple(lens[lens > 0].tolist()))


def _without_exchange(model: Any) -> None:
    for layer in layers_of(model):
        attention_of(layer).exchange = None


def _shift_late(batch: Batch, rank: int, degree: int, *, ring: int) -> Batch:
    """As if labels were made of the part: its last token has none."""
    part = split_batch(batch, rank, degree, ring=ring)
    labels = part.shift_labels.clone()
    labels[-1] = IGNORE
    return replace(part, shift_labels=labels, num_valid=(int((labels != IGNORE).sum()),))


def _gradient_twice(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(0.5)


def _gradient_mean(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(float(dist.get_world_size()))


def _unsummed(case: Case, *, steps: int) -> Any:
    """The gradient of a shared KV head taken from one of the ranks that share it."""
    summed = ulysses._sum_shared
    ulysses._sum_shared = lambda by_rank: by_rank[:, 0]
    try:
        return this_rank(case, steps=steps)
    finally:
        ulysses._sum_shared = summed


BROKEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "loss averaged by rank": (
        "ulysses 2, SFT mask, rows",
        partial(this_rank, count=lambda valid, mesh: float(valid * mesh.size())),
    ),
    "labels shifted after the split": ("ulysses 2, full", partial(this_rank, split=_shift_late)),
    "documents cut at rank borders": (
        "ulysses 2, recomputed",
        partial(this_rank, split=_cut_documents, change=_without_exchange),
    ),
    "gradient twice": ("ulysses 2, full", partial(this_rank, change=_gradient_twice)),
    "gradient averaged over ranks": ("fsdp 2", partial(this_rank, change=_gradient_mean)),
    "gradient of a shared head not summed": ("ulysses 2, one KV head", _unsummed),
}


# Other questions


def count_slices(world: int) -> dict[str, float]:
    """Head slices per token that ranks send through attention of the Llama-3-8B shape, forward and backward."""
    mesh = build_mesh(ParallelConfig(ulysses=world), world, "cpu")
    shape = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 2, "num_hidden_layers": 1}
    model = build_model(**shape)
    apply_sequence(model, mesh)
    sent: list[int] = []
    swap = dist.all_to_all_single

    def counted(received: torch.Tensor, send: torch.Tensor, **kwargs: Any) -> Any:
        sent.append(send.numel())
        return swap(received, send, **kwargs)

    dist.all_to_all_single = counted
    try:
        num_tokens = 3
        inputs = {
            "input_ids": torch.arange(num_tokens)[None],
            "position_ids": torch.arange(num_tokens)[None],
            "doc_lens": (num_tokens * world,),
        }
        out = model.base_model(**inputs, use_cache=False).last_hidden_state
        forward = sum(sent)
        out.sum().backward()
    finally:
        dist.all_to_all_single = swap
    per_token = num_tokens * shape["head_dim"]
    return {"forward": forward / per_token, "backward": (sum(sent) - forward) / per_token, "messages": len(sent)}


def sinks(world: int) -> dict[str, torch.Tensor]:
    """Attention with sinks, which are parameters by head: the whole row here, and this rank's part by exchange."""
    torch.manual_seed(0)
    num_tokens = 5 * world
    heads = [torch.randn(1, num, num_tokens, 8) for num in (4, 2, 2)]
    sink = torch.linspace(-1, 2, 4, requires_grad=True)
    module = torch.nn.Module()
    options = {"doc_lens": (3, num_tokens - 3), "s_aux": sink}
    wanted = attend(module, *heads, None, **options)[0]
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), sink)
    mesh = build_mesh(ParallelConfig(ulysses=world), world, "cpu")
    module.exchange = Exchange(ulysses=mesh.get_group("ulysses"), ring=None)
    mine = [tensor.tensor_split(world, dim=2)[dist.get_rank()] for tensor in heads]
    found = attend(module, *mine, None, **options)[0]
    (found_grad,) = torch.autograd.grad(found.square().sum(), sink)
    dist.all_reduce(found_grad)
    part = wanted.tensor_split(world, dim=1)[dist.get_rank()]
    return {"found": found.detach(), "wanted": part.detach(), "found_grad": found_grad, "wanted_grad": wanted_grad}


def load_into_shards(world: int, folder: Path, family: str) -> dict[str, Any]:
    """A model that was saved whole, read part by part: its weights, and how much of them this rank has read."""
    folder = folder / family
    if dist.get_rank() == 0:
        build_model(family, seed=3, vocab_size=LOADED_VOCAB).save_pretrained(folder, max_shard_size="30KB")
    dist.barrier()
    read: list[int] = []
    read_rows = fsdp.read_rows

    def counted(piece: Any, rows: slice) -> torch.Tensor:
        found = read_rows(piece, rows)
        read.append(found.numel())
        return found

    fsdp.read_rows = counted
    mesh = build_mesh(ParallelConfig(), world, "cpu")
    try:
        model = fsdp.build_empty(AutoConfig.from_pretrained(folder))
        was_empty = all(parameter.is_meta for parameter in model.parameters())
        parallelize(model, mesh, ParallelConfig())
        fsdp.load_shards(model, folder, torch.device("cpu"))
    finally:
        fsdp.read_rows = read_rows
    weights = {name: full_tensor(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        logits = model(input_ids=torch.arange(12)[None], use_cache=False).logits
    return {
        "empty": was_empty,
        "weights": weights,
        "largest": max(read),
        "all": sum(read),
        "logits": logits,
        "files": len(list(folder.glob("*.safetensors"))),
    }


def load_refused(world: int, folder: Path) -> str:
    """Files that lack a weight."""
    model = build_model("llama")
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        save_file({"model.norm.weight": model.model.norm.weight.detach()}, folder / "model.safetensors")
    dist.barrier()
    empty = fsdp.build_empty(model.config)
    apply_fsdp(empty, build_mesh(ParallelConfig(), world, "cpu"))
    try:
        fsdp.load_shards(empty, folder, torch.device("cpu"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def places(world: int) -> Any:
    mesh = build_mesh(ParallelConfig(ulysses=2), world, "cpu")
    gathered: list[Any] = [None] * world
    groups = {axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis in AXES}
    dist.all_gather_object(gathered, (rank_coords(mesh), groups))
    return gathered


def jobs(world: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """What `world` ranks compute: (outcome, whether a second run has the same bits) for cases."""

    def twice(case: Case) -> Any:
        first = this_rank(case)
        return first, same_bits(first, this_rank(case, steps=1))

    found: dict[str, Callable[[], Any]] = {
        name: partial(twice, case) for name, case in CASES.items() if case.world == world
    }
    found |= {name: partial(run, CASES[of], steps=1) for name, (of, run) in BROKEN.items() if CASES[of].world == world}
    found["slices"] = partial(count_slices, world)
    found["sinks"] = partial(sinks, world)
    found["places"] = partial(places, world)
    for family in ("llama", "llama-tied"):
        found[f"load {family}"] = partial(load_into_shards, world, folder, family)
    found["load refused"] = partial(load_refused, world, folder / "broken")
    return found | step_jobs(world)
