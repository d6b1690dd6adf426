"""The chunked loss against the plain one: full logits in fp32."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from unspool.model.loss import IGNORE, summed_loss, token_losses

NUM_TOKENS, NUM_WORDS, DIM = 37, 53, 16
CHUNKS = [1, 7, 36, 37, 1000]


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(NUM_WORDS, (NUM_TOKENS,), generator=generator)
    labels[[0, 5, 6, 36]] = IGNORE
    hidden = torch.randn(NUM_TOKENS, DIM, generator=generator, requires_grad=True)
    return hidden, torch.randn(NUM_WORDS, DIM, generator=generator, requires_grad=True), labels


def plain(hidden, weight, labels) -> torch.Tensor:
    return functional.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("upstream", [1.0, 0.37 / 33])
def test_loss_and_gradients_equal_those_of_full_logits(inputs, chunk, upstream):
    hidden, weight, labels = inputs
    wanted = plain(hidden, weight, labels)
    wanted_grads = torch.autograd.grad(wanted * upstream, (hidden, weight))

    found, losses = summed_loss(hidden, weight, labels, chunk=chunk)
    found_grads = torch.autograd.grad(found * upstream, (hidden, weight))

    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    for ours, reference in zip(found_grads, wanted_grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5 * upstream)
    assert not losses.requires_grad


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_loss_of_every_token_equals_that_of_full_logits(inputs, chunk):
    hidden, weight, labels = inputs
    wanted = functional.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORE, reduction="none")

    _, training = summed_loss(hidden, weight, labels, chunk=chunk)
    evaluation = token_losses(hidden, weight, labels, chunk=chunk)

    torch.testing.assert_close(training, wanted)
    torch.testing.assert_close(evaluation, wanted)
    assert (training[labels == IGNORE] == 0).all()
    assert (evaluation[labels == IGNORE] == 0).all()


def test_nothing_to_learn_is_a_loss_of_zero_and_no_gradient(inputs):
    hidden, weight, _ = inputs

    total, losses = summed_loss(hidden, weight, torch.full((NUM_TOKENS,), IGNORE), chunk=8)
    grads = torch.autograd.grad(total, (hidden, weight))

    assert total == 0
    assert (losses == 0).all()
    assert all((grad == 0).all() for grad in grads)


def test_an_ignored_position_gets_no_gradient_and_changes_no_other(inputs):
    hidden, weight, labels = inputs
    total, _ = summed_loss(hidden, weight, labels, chunk=8)
    (grad,) = torch.autograd.grad(total, hidden)

    other = hidden.detach().clone()
    other[labels == IGNORE] += 3
    after, _ = summed_loss(other.requires_grad_(), weight, labels, chunk=8)

    assert (grad[labels == IGNORE] == 0).all()
    assert (grad[labels != IGNORE] != 0).any(dim=1).all()
    assert torch.equal(after, total)


def test_huge_logits_stay_finite(inputs):
    hidden, weight, labels = inputs

    total, losses = summed_loss(hidden * 1e4, weight, labels, chunk=8)
    grads = torch.autograd.grad(total, (hidden, weight))

    torch.testing.assert_close(total, plain(hidden * 1e4, weight, labels))
    assert torch.isfinite(losses).all()
    assert all(torch.isfinite(grad).all() for grad in grads)


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_holds_tokens_times_vocabulary():
    tokens, words, dim, chunk = 128, 101, 4, 8
    hidden = torch.randn(tokens, dim, requires_grad=True)
    weight = torch.randn(words, dim, requires_grad=True)
    labels = torch.randint(words, (tokens,))

    with _Largest() as ours:
        summed_loss(hidden, weight, labels, chunk=chunk)[0].backward()
        token_losses(hidden, weight, labels, chunk=chunk)
    with _Largest() as full:
        plain(hidden, weight, labels).backward()

    assert full.elements == tokens * words, "the probe would not see it"
    assert ours.elements == chunk * words


def test_half_precision_inputs_give_sums_in_fp32():
    """At a loss of thousands bf16 could not count further tokens."""
    hidden = torch.zeros(5000, 8, dtype=torch.bfloat16)
    weight = torch.zeros(64, 8)

    total, losses = summed_loss(hidden, weight, torch.zeros(5000, dtype=torch.int64))

    assert total.dtype == losses.dtype == torch.float32
    torch.testing.assert_close(total, torch.tensor(5000 * torch.log(torch.tensor(64.0)).item()))
