import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from unspool.core.errors import ConfigError, DataError
from unspool.evals.backends import transformers
from unspool.evals.backends.transformers import window_losses
from unspool.evals.heldout import Materials
from unspool.evals.prompts import encode
from unspool.evals.suites.perplexity import PerplexityEval, windows
from unspool.models.loss import bucket_losses

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


def loss_eval(**options) -> PerplexityEval:
    return PerplexityEval.model_validate({"suite": "perplexity", **options})


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@pytest.fixture(scope="module")
def model():
    return new_model()


def test_losses_equal_a_plain_computation_with_all_logits(model, monkeypatch):
    ids = np.random.default_rng(0).integers(97, size=300).astype(np.uint32)
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    wanted = -torch.log_softmax(logits[:-1].double(), dim=-1)[torch.arange(299), tokens[1:]].numpy()

    for chunk in (64, 299, 1024):
        monkeypatch.setattr(transformers, "HEAD_CHUNK", chunk)
        found = window_losses(model, ids)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    assert abs(bucket_losses(found)[1]["value"] - wanted[63:127].mean()) < 1e-5


def test_a_model_that_knows_nothing_loses_the_logarithm_of_its_vocabulary(model):
    with torch.no_grad():
        blank = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
        blank.lm_head.weight.zero_()

    np.testing.assert_allclose(window_losses(blank, np.arange(50, dtype=np.uint32)), math.log(97), rtol=1e-6)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_tensor_of_tokens_by_vocabulary_exists(model, monkeypatch):
    monkeypatch.setattr(transformers, "HEAD_CHUNK", 32)
    ids = np.arange(400, dtype=np.uint32) % 97

    with Largest() as largest:
        window_losses(model, ids)

    assert 0 < largest.numel < 399 * 97


def test_the_loss_follows_a_model_that_caps_its_logits():
    torch.manual_seed(0)
    capped = Gemma2ForCausalLM(Gemma2Config(**SHAPE, final_logit_softcapping=1.0)).eval()
    ids = torch.arange(50)

    losses = window_losses(capped, ids.numpy().astype(np.uint32))

    own = torch.nn.functional.cross_entropy(capped(ids[None]).logits[0, :-1], ids[1:], reduction="none")
    assert np.allclose(losses, own.detach().numpy(), atol=1e-5)


def test_a_window_costs_one_forward_pass_and_each_new_model_two_more_for_the_check_of_its_head():
    lengths = []
    for model in (new_model(), new_model()):
        model.base_model.register_forward_hook(
            lambda module, args, kwargs, output: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        losses = [window_losses(model, np.arange(length, dtype=np.uint32)) for length in (50, 40, 50)]
        np.testing.assert_array_equal(losses[0], losses[2])

    assert lengths == 2 * [8, 8, 50, 40, 50]


def test_a_model_that_changes_its_logits_unseen_is_refused_every_time_also_after_another_model(model, monkeypatch):
    window_losses(model, np.arange(50, dtype=np.uint32))
    model = new_model()
    own = model.forward

    def hotter(*args, **kwargs):
        out = own(*args, **kwargs)
        out.logits = 3 * out.logits
        return out

    monkeypatch.setattr(model, "forward", hotter)

    for _ in range(2):
        with pytest.raises(ConfigError, match="changes its logits after the head"):
            window_losses(model, np.arange(50, dtype=np.uint32))


def test_windows_do_not_overlap_nor_cross_documents(materials):
    found = windows(loss_eval(length=256, samples=1000), materials, seed=0)

    bos = materials.tokenizer.bos_token_id
    whole = [encode(materials.tokenizer, text) for text in materials.documents]
    assert len(found) == sum(len(ids) // 255 for ids in whole) > 10
    spans = []
    for window in found:
        assert len(window) == 256 and window[0] == bos
        spans += [
            (which, at)
            for which, ids in enumerate(whole)
            for at in range(len(ids) - 254)
            if ids[at] == window[1] and np.array_equal(ids[at : at + 255], window[1:])
        ]
    assert len(spans) == len(found), "each window should be found in one document, once"
    spans.sort()
    assert all(a[0] != b[0] or b[1] - a[1] >= 255 for a, b in pairwise(spans))


def test_windows_are_chosen_by_the_seed(materials):
    def drawn(seed: int) -> list[bytes]:
        return [ids.tobytes() for ids in windows(loss_eval(length=256, samples=4), materials, seed=seed)]

    assert drawn(0) == drawn(0)
    assert len(drawn(0)) == 4
    assert drawn(0) != drawn(1)


def test_text_without_a_long_enough_document_is_refused(tokenizer, words):
    short = Materials(tokenizer=tokenizer, words=words, documents=["A few words.", "A few words more than that."])

    with pytest.raises(DataError, match=r"no document of the held-out text has 4096 tokens \(the longest has \d+\)"):
        windows(loss_eval(length=4096), short, seed=0)


def test_a_length_with_nothing_to_predict_is_refused(materials):
    with pytest.raises(ConfigError, match="leaves no tokens to predict"):
        windows(loss_eval(length=2), materials, seed=0)
