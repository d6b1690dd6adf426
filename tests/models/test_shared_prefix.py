"""Questions that are answered side by side, against each one alone."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from factory import attention_inputs
from unspool.models.attention.interface import NAME, register
from unspool.models.generation import greedy, shared_prefix
from unspool.models.generation.greedy import PreallocatedLayer, answer
from unspool.models.generation.shared_prefix import SharedPrefixAttention, can_share_prefix, partial_attention

from .test_greedy import SHAPE, plain


@pytest.fixture(scope="module")
def model():
    register()
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation=NAME)).eval()


@pytest.fixture
def questions() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(97, size=size).astype(np.uint32) for size in (30, 9, 17, 2)]


CONTEXT = np.arange(40, dtype=np.uint32)


def calls_of(model, run) -> list[int]:
    """How many tokens each pass over the model took."""
    sizes: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    run()
    hook.remove()
    return sizes


def test_questions_share_passes_and_answer_as_alone(model, questions):
    found: list[list[int]] = []
    sizes = calls_of(model, lambda: found.extend(answer(model, CONTEXT, questions, max_new_tokens=5, stop_ids=())))

    assert found == [plain(model, CONTEXT, question, 5) for question in questions]
    assert sizes == [40, 58, 4, 4, 4, 4]


def test_a_question_that_is_done_leaves_the_row(model, questions):
    free = answer(model, CONTEXT, questions, max_new_tokens=5, stop_ids=())
    stop = free[0][1]
    sizes = calls_of(model, lambda: answer(model, CONTEXT, questions, max_new_tokens=5, stop_ids={stop}))

    assert sizes[1] == 58 and sizes[-1] < 4


def test_seeing_another_question_would_be_noticed(model, questions, monkeypatch):
    wanted = [plain(model, CONTEXT, question, 5) for question in questions]
    monkeypatch.setattr(
        SharedPrefixAttention,
        "_own_mask",
        lambda self, window: torch.ones(self._num_new, len(self._owners), dtype=torch.bool),
    )

    assert answer(model, CONTEXT, questions, max_new_tokens=5, stop_ids=()) != wanted


def test_forgetting_the_context_would_be_noticed(model, questions, monkeypatch):
    wanted = [plain(model, CONTEXT, question, 5) for question in questions]
    own = shared_prefix.partial_attention

    def forgetful(inputs, mask):
        out, log_sum = own(inputs, mask)
        return (out, log_sum) if mask is not None else (out, torch.full_like(log_sum, -torch.inf))

    monkeypatch.setattr(shared_prefix, "partial_attention", forgetful)

    assert answer(model, CONTEXT, questions, max_new_tokens=5, stop_ids=()) != wanted


def test_nothing_of_it_stays_on_the_model(model, questions):
    answer(model, CONTEXT, questions, max_new_tokens=2, stop_ids=())

    assert not any(hasattr(module, "exchange") for module in model.modules())


def test_a_part_without_visible_keys_weighs_nothing():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)

    out, log_sum = partial_attention(attention_inputs(query, key, value), torch.zeros(3, 5, dtype=torch.bool))

    assert out.eq(0).all() and log_sum.eq(-torch.inf).all()


def test_long_questions_are_answered_one_by_one(model, questions, monkeypatch):
    monkeypatch.setattr(greedy, "MAX_SHARED_TOKENS", 16)
    sizes = calls_of(model, lambda: answer(model, CONTEXT, questions, max_new_tokens=2, stop_ids=()))

    assert sizes == [40, 30, 1, 9, 1, 17, 1, 2, 1]


def test_models_of_other_attention_are_left_alone():
    assert not can_share_prefix(LlamaForCausalLM(LlamaConfig(**SHAPE)))


BY_LENGTH = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    },
}


@pytest.mark.parametrize("kind", BY_LENGTH)
@pytest.mark.parametrize("context", [CONTEXT[:0], CONTEXT[:4]], ids=["no context", "context"])
def test_a_long_neighbour_changes_no_answer_where_positions_depend_on_the_longest(kind, context, questions):
    register()
    torch.manual_seed(0)
    shape = SHAPE | {"max_position_embeddings": 16}
    config = LlamaConfig(**shape, rope_parameters=BY_LENGTH[kind], attn_implementation=NAME)
    model = LlamaForCausalLM(config).eval()
    found = answer(model, context, questions, max_new_tokens=4, stop_ids=())
    assert found == [answer(model, context, [ids], max_new_tokens=4, stop_ids=())[0] for ids in questions]
    assert not can_share_prefix(model)


def test_the_cache_keeps_what_it_was_given_and_copies_only_to_grow():
    torch.manual_seed(0)
    layer = PreallocatedLayer(8)
    given = [torch.randn(1, 2, size, 4) for size in (5, 2, 1, 9)]
    stores = []
    for part in given:
        keys, values = layer.update(part, 2 * part)
        stores.append(layer._buffers[0].data_ptr())

    assert torch.equal(keys, torch.cat(given, dim=2)) and torch.equal(values, 2 * keys)
    assert stores[0] == stores[1] == stores[2] != stores[3]
    layer.crop(-9)
    assert layer.get_seq_length() == 8
    assert torch.equal(layer.update(given[1], given[1])[0], torch.cat([*given[:3], given[1]], dim=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 100])
def test_parts_on_cuda_in_bfloat16_are_those_in_fp32(window):
    torch.manual_seed(0)
    shared, own = 512, 40
    query = torch.randn(1, 8, own, 64, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, 1, 2, shared + own, 64, device="cuda", dtype=torch.bfloat16)
    told = SharedPrefixAttention(shared, query.device)
    owners = torch.arange(own, device="cuda") // 10
    told.add_tokens(owners, shared + torch.arange(own, device="cuda") % 10)

    found = told(None, attention_inputs(query, key, value, window=window))

    wanted = told(None, attention_inputs(query.float(), key.float(), value.float(), window=window))
    torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.02)
