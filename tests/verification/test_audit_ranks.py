"""`unspool.audit` of a step under context parallelism, on two ranks."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from training.parallel.ranks import run_ranks
from unspool.models.checks import intercept_attention
from unspool.training.batch import build_batch, split_batch
from unspool.training.collator import Collator
from unspool.training.parallel.apply import Exchange
from unspool.training.step import loss_pass
from unspool.verification.audits.run import AuditResult, audit

from .audit_setups import plain_step, rows, small_model

pytestmark = pytest.mark.slow
# 21 and 24 tokens: the second rank has fewer of the first.
ROWS = rows()[:4]


def probe(*, mean_of_ranks: bool) -> AuditResult:
    model = small_model(attention="unspool")

    def parallel(model: Any, _: list[Any]) -> float:
        """Ulysses: half of the tokens of every row on each rank."""
        batches = [build_batch([row], attention="intra_document") for row in ROWS]
        parts = [split_batch(batch, dist.get_rank(), 2) for batch in batches]
        num_valid = sum(
            sum((part if mean_of_ranks else batch).num_valid) for part, batch in zip(parts, batches, strict=True)
        )
        exchange = Exchange(ulysses=dist.group.WORLD, ring=None)
        total = 0.0
        with intercept_attention(model, lambda _: exchange):
            for part in parts:
                loss = loss_pass(model, part)[0] / num_valid / (2 if mean_of_ranks else 1)
                loss.backward()
                total += loss.item()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        sums = Tensor([total])
        dist.all_reduce(sums)
        return sums.item()

    data = [Collator(model)([row]) for row in ROWS]
    return audit(model, data, plain_step, context_parallel=parallel)


@pytest.mark.parametrize("mean_of_ranks", [False, True])
def test_ulysses_changes_nothing_and_a_mean_of_the_means_of_ranks_is_found(mean_of_ranks, tmp_path):
    def work(rank: int) -> None:
        found = probe(mean_of_ranks=mean_of_ranks)
        assert found.broken == (("context_parallel",) if mean_of_ranks else ()), str(found)

    run_ranks(work, world_size=2, store=tmp_path / "store")
