"""The chunked loss against the plain one: full logits in fp32."""

import pytest
import torch
from torch.nn import functional

from models.memory_factory import Largest
from unspool.data.packing.row import IGNORE
from unspool.models import loss as loss_module
from unspool.models.loss import Head, summed_loss, token_losses

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


def plain_logits(hidden, weight, bias=None, scale=1.0, softcap=None) -> torch.Tensor:
    logits = functional.linear(hidden, weight, bias) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


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


SHAPES = [{"bias": True}, {"scale": 0.25}, {"softcap": 3.0}, {"bias": True, "scale": 0.5, "softcap": 3.0}]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_what_a_head_does_to_its_logits_is_in_loss_and_gradients(inputs, shape, chunk):
    hidden, weight, labels = inputs
    bias = torch.randn(NUM_WORDS, generator=torch.Generator().manual_seed(2), requires_grad=True)
    shape = shape | ({"bias": bias} if "bias" in shape else {})
    leaves = [hidden, weight, *([bias] if "bias" in shape else [])]
    logits = plain_logits(hidden, weight, **shape)
    wanted = functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    wanted_grads = torch.autograd.grad(wanted.sum(), leaves)

    head = Head(weight=weight, **shape)
    total, losses = summed_loss(hidden, head, labels, chunk=chunk)
    grads = torch.autograd.grad(total, leaves)

    torch.testing.assert_close(head.logits(hidden), logits)
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(token_losses(hidden, head, labels, chunk=chunk), wanted)
    for ours, reference in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
    assert abs(total.item() - plain(hidden, weight, labels).item()) > 1, "the shape did nothing, so nothing was tried"


@pytest.mark.parametrize("shape", [{}, *SHAPES])
@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_weights_scale_each_tokens_loss_and_gradient(inputs, shape, chunk):
    hidden, weight, labels = inputs
    bias = torch.randn(NUM_WORDS, generator=torch.Generator().manual_seed(2), requires_grad=True)
    shape = shape | ({"bias": bias} if "bias" in shape else {})
    leaves = [hidden, weight, *([bias] if "bias" in shape else [])]
    weights = label_weights(labels)
    wanted = functional.cross_entropy(
        plain_logits(hidden, weight, **shape), labels, ignore_index=IGNORE, reduction="none"
    )
    wanted_grads = torch.autograd.grad((weights * wanted).sum(), leaves)

    for num_valid in (None, 5 * len(labels) // 10):  # slices, and rows that are gathered
        some = labels if num_valid is None else keep_first(labels, num_valid)
        total, losses = summed_loss(
            hidden, Head(weight=weight, **shape), some, chunk=chunk, num_valid=num_valid, weights=weights
        )
        torch.testing.assert_close(losses, wanted * (some != IGNORE))
        torch.testing.assert_close(total, (weights * wanted * (some != IGNORE)).sum())
    total, _ = summed_loss(hidden, Head(weight=weight, **shape), labels, chunk=chunk, weights=weights)
    for ours, reference in zip(torch.autograd.grad(total, leaves), wanted_grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=2e-5)


def label_weights(labels: torch.Tensor) -> torch.Tensor:
    """Weights from 0.1 to about 5, and 0 where labels are ignored."""
    weights = 0.1 + 5 * torch.rand(len(labels), generator=torch.Generator().manual_seed(7)).to(labels.device)
    return weights * (labels != IGNORE)


def keep_first(labels: torch.Tensor, count: int) -> torch.Tensor:
    return labels.masked_fill((labels != IGNORE).cumsum(0) > count, IGNORE)


def test_without_gradients_no_product_is_computed_and_losses_are_the_same(inputs, monkeypatch):
    hidden, weight, labels = inputs
    _, wanted = summed_loss(hidden, weight, labels, chunk=8)
    monkeypatch.setattr(loss_module, "_WeightGrad", None)

    with torch.no_grad():
        _, found = summed_loss(hidden, weight, labels, chunk=8)

    assert torch.equal(found, wanted)


def test_tied_embeddings_get_the_gradient_of_both_uses(inputs):
    _, weight, labels = inputs
    tokens = torch.arange(NUM_TOKENS) % NUM_WORDS
    found = torch.autograd.grad(summed_loss(weight[tokens], weight, labels, chunk=8)[0], weight)[0]
    wanted = torch.autograd.grad(plain(weight[tokens], weight, labels), weight)[0]

    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_costs_no_product(inputs, trained, monkeypatch):
    leaves = dict(zip(("hidden", "weight"), inputs[:2], strict=True))
    labels = inputs[2]
    wanted = torch.autograd.grad(plain(*leaves.values(), labels), leaves[trained])[0]
    frozen = {name: leaf if name == trained else leaf.detach() for name, leaf in leaves.items()}
    if trained == "hidden":
        monkeypatch.setattr(loss_module, "_WeightGrad", None)

    total, _ = summed_loss(frozen["hidden"], frozen["weight"], labels, chunk=8)

    torch.testing.assert_close(torch.autograd.grad(total, frozen[trained])[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.97])
@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_ignored_rows_are_skipped_without_a_change(share, chunk, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(300, DIM, generator=generator, requires_grad=True)
    weight = torch.randn(NUM_WORDS, DIM, generator=generator, requires_grad=True)
    labels = torch.randint(NUM_WORDS, (300,), generator=generator)
    labels[torch.rand(300, generator=generator) < share] = IGNORE
    num_valid = int((labels != IGNORE).sum())
    wanted = torch.autograd.grad(plain(hidden, weight, labels), (hidden, weight))
    rows = []
    true_grad = loss_module._softmax_grad
    monkeypatch.setattr(loss_module, "_softmax_grad", lambda *args: rows.append(len(args[1])) or true_grad(*args))

    total, losses = summed_loss(hidden, weight, labels, chunk=chunk, num_valid=num_valid)
    found = torch.autograd.grad(total, (hidden, weight))

    torch.testing.assert_close(losses, token_losses(hidden, weight, labels))
    for ours, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
    assert sum(rows) == (300 if share < 0.05 else num_valid)
    assert max(rows) <= chunk


def test_gradients_can_be_used_once(inputs):
    hidden, weight, labels = inputs
    total, _ = summed_loss(hidden, weight, labels)
    torch.autograd.grad(total, hidden, retain_graph=True)

    with pytest.raises(RuntimeError, match="differentiated before"):
        torch.autograd.grad(total, hidden)


@pytest.mark.parametrize("num_words", [1, 2, 7, 8, 101])
def test_the_weights_gradient_is_rounded_in_place_and_right(num_words, monkeypatch):
    """Rows that overlap where they come from, in blocks of several sizes."""
    generator = torch.Generator().manual_seed(4)
    grad = torch.randn(9, num_words, generator=generator).bfloat16()
    hidden = torch.randn(9, DIM, generator=generator).bfloat16()
    weight = torch.zeros(num_words, DIM, dtype=torch.bfloat16)
    for rows in (1, 3, 4096):
        monkeypatch.setattr(loss_module, "ROWS", rows)
        sums = loss_module._WeightGrad(weight)
        wanted = torch.zeros(num_words, DIM)
        for _ in range(3):
            sums.add(grad, hidden)
            wanted += (grad.t() @ hidden).float()

        found = sums.rounded()

        assert found.is_contiguous()
        assert torch.equal(found, wanted.bfloat16())
        assert found.untyped_storage().nbytes() <= 2 * (num_words + 1) * DIM


def test_the_upstream_factor_is_not_rounded_to_bfloat16():
    hidden = torch.randn(64, DIM, generator=torch.Generator().manual_seed(5)).bfloat16().requires_grad_()
    weight = torch.randn(NUM_WORDS, DIM, generator=torch.Generator().manual_seed(6))
    labels = torch.arange(64) % NUM_WORDS
    (whole,) = torch.autograd.grad(summed_loss(hidden, weight, labels)[0], hidden)

    (scaled,) = torch.autograd.grad(summed_loss(hidden, weight, labels)[0] / 367, hidden)

    bias = float((scaled.double() * 367 / whole.double()).nanmean()) - 1
    assert abs(float(torch.tensor(1 / 367).bfloat16()) * 367 - 1) > 1e-3, "this factor shows the rounding"
    assert abs(bias) < 3e-4


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


def test_no_tensor_holds_tokens_times_vocabulary():
    tokens, words, dim, chunk = 128, 101, 4, 8
    hidden = torch.randn(tokens, dim, requires_grad=True)
    weight = torch.randn(words, dim, requires_grad=True)
    labels = torch.randint(words, (tokens,))

    with Largest() as ours:
        summed_loss(hidden, weight, labels, chunk=chunk)[0].backward()
        token_losses(hidden, weight, labels, chunk=chunk)
    with Largest() as full:
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


# CUDA, where a kernel of our own makes the gradient


def on_cuda(dtype, num_words, share=0.1):
    generator = torch.Generator().manual_seed(num_words)
    hidden = torch.randn(700, 64, generator=generator).to(dtype)
    weight = torch.randn(num_words, 64, generator=generator).to(dtype) / 4
    labels = torch.randint(num_words, (700,), generator=generator)
    labels[torch.rand(700, generator=generator) < share] = IGNORE
    return hidden.cuda().requires_grad_(), weight.cuda().requires_grad_(), labels.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_words", [53, 8192, 20_001])
@pytest.mark.parametrize("shape", [{}, *SHAPES])
@pytest.mark.parametrize("chunk", [128, 1000])
def test_cuda_equals_full_logits_in_fp32(dtype, num_words, shape, chunk):
    hidden, weight, labels = on_cuda(dtype, num_words)
    bias = torch.randn(num_words, device="cuda").to(dtype).requires_grad_()
    shape = shape | ({"bias": bias} if "bias" in shape else {})
    leaves = [hidden, weight, *([bias] if "bias" in shape else [])]
    exact = shape | ({"bias": bias.float()} if "bias" in shape else {})
    logits = plain_logits(hidden.float(), weight.float(), **exact)
    wanted = functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    wanted_grads = torch.autograd.grad(wanted.sum(), leaves)

    total, losses = summed_loss(hidden, Head(weight=weight, **shape), labels, chunk=chunk)
    grads = torch.autograd.grad(total, leaves)

    close = 1e-4 if dtype == torch.float32 else 1e-2
    for ours, right in zip([losses, *grads], [wanted, *wanted_grads], strict=True):
        assert float((ours.float() - right.float()).norm() / right.float().norm()) < close
    assert (losses[labels == IGNORE] == 0).all()
    assert (grads[0][labels == IGNORE] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("shape", [{}, {"scale": 0.5, "softcap": 3.0}])
def test_cuda_weights_scale_each_tokens_loss_and_gradient(dtype, share, shape):
    hidden, weight, labels = on_cuda(dtype, 20_001, share)
    weights, num_valid = label_weights(labels), int((labels != IGNORE).sum())
    logits = plain_logits(hidden.float(), weight.float(), **shape)
    wanted = functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    wanted_grads = torch.autograd.grad((weights * wanted).sum(), (hidden, weight))

    head = Head(weight=weight, **shape)
    total, losses = summed_loss(hidden, head, labels, chunk=128, num_valid=num_valid, weights=weights)
    grads = torch.autograd.grad(total, (hidden, weight))

    close = 1e-4 if dtype == torch.float32 else 1e-2
    assert float(total) == pytest.approx(float((weights * wanted).sum()), rel=close)
    for ours, right in zip([losses, *grads], [wanted, *wanted_grads], strict=True):
        assert float((ours.float() - right.float()).norm() / right.float().norm()) < close


@pytest.mark.gpu
def test_cuda_weights_of_1_change_no_bit():
    hidden, weight, labels = on_cuda(torch.bfloat16, 1000)
    plain_total, plain_losses = summed_loss(hidden, weight, labels, chunk=128)
    wanted = torch.autograd.grad(plain_total, (hidden, weight))

    total, losses = summed_loss(hidden, weight, labels, chunk=128, weights=torch.ones(len(labels), device="cuda"))

    assert torch.equal(losses, plain_losses)
    assert all(map(torch.equal, torch.autograd.grad(total, (hidden, weight)), wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_cuda_skips_ignored_rows_without_waiting_for_the_device(share):
    hidden, weight, labels = on_cuda(torch.bfloat16, 1000, share)
    num_valid = int((labels != IGNORE).sum())
    wanted = torch.autograd.grad(summed_loss(hidden, weight, labels, chunk=128)[0], (hidden, weight))
    summed_loss(hidden, weight, labels, chunk=128, num_valid=num_valid)
    torch.cuda.set_sync_debug_mode("error")
    try:
        total, _ = summed_loss(hidden, weight, labels, chunk=128, num_valid=num_valid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = torch.autograd.grad(total, (hidden, weight))

    for ours, right in zip(found, wanted, strict=True):
        assert float((ours.float() - right.float()).norm()) <= 1e-2 * float(right.float().norm())


@pytest.mark.gpu
def test_cuda_peak_memory_is_the_gradients_and_one_chunk():
    tokens, words, dim = 8192, 65_536, 1024
    hidden = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(words, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(words, (tokens,), device="cuda")
    summed_loss(hidden, weight, labels)[0].backward()
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    summed_loss(hidden, weight, labels)[0].backward()

    logits = loss_module.GPU_LOGITS
    expected = 4 * words * dim + 2 * tokens * dim + logits
    assert torch.cuda.max_memory_allocated() - before < 1.1 * expected + (64 << 20)


def test_huge_logits_lose_no_digits():
    logits = 5000 + 3 * torch.randn(20, NUM_WORDS, generator=torch.Generator().manual_seed(4))
    labels = torch.arange(20) % NUM_WORDS
    exact = logits.double().requires_grad_()
    wanted = functional.cross_entropy(exact, labels, reduction="none")
    wanted_grad = torch.autograd.grad(wanted.sum(), exact)[0]

    losses, grad = loss_module._softmax_grad(logits.clone(), labels, 1.0, None)

    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-6, atol=1e-6)
