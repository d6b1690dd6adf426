import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from unspool.models.attention.interface import NAME, register
from unspool.models.generation.greedy import answer
from unspool.models.rotary import apply_head_bases, decide_by_document

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large weights, so that the most likely token depends on the context.
    "initializer_range": 0.4,
}


KINDS = ["unspool", "harpe", "sdpa", "window", "our window", "capped", "sinks"]


def made(kind: str, **options):
    """Our attention, ours with a base per head, that of transformers, a sliding window of either, and what else
    layers ask for."""
    register()
    torch.manual_seed(0)
    shape = {**SHAPE, **options}
    if kind == "our window":
        return MistralForCausalLM(MistralConfig(**shape, sliding_window=16, attn_implementation=NAME)).eval()
    if kind == "capped":
        # A window in every second layer and scores that are capped.
        capped = {"sliding_window": 16, "attn_logit_softcapping": 2.0, "head_dim": 8, "query_pre_attn_scalar": 8}
        return Gemma2ForCausalLM(Gemma2Config(**{**capped, **shape}, attn_implementation=NAME)).eval()
    if kind == "sinks":
        experts = {"sliding_window": 16, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
        model = GptOssForCausalLM(GptOssConfig(**{**experts, **shape}, attn_implementation=NAME)).eval()
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
        return model
    if kind == "window":
        return MistralForCausalLM(MistralConfig(**shape, sliding_window=16)).eval()
    attention = "sdpa" if kind == "sdpa" else NAME
    model = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation=attention)).eval()
    if kind == "harpe":
        apply_head_bases(model, np.array([10_000.0, 500.0]))
    return model


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return made(request.param)


@pytest.fixture
def context() -> np.ndarray:
    return np.random.default_rng(1).integers(97, size=75).astype(np.uint32)


@pytest.fixture
def questions() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(97, size=size).astype(np.uint32) for size in (1, 5, 3, 12)]


def plain(model, context, question, max_new_tokens, stop_ids=()) -> list[int]:
    """Greedy decoding by whole forward passes, without a cache."""
    ids = [*context.tolist(), *question.tolist()]
    generated = []
    while len(generated) < max_new_tokens:
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids + generated]), use_cache=False).logits[0, -1].argmax())
        if token in stop_ids:
            break
        generated.append(token)
    return generated


@pytest.mark.parametrize("prefill_chunk", [7, 75, 1000])
def test_answers_equal_decoding_without_a_cache(model, context, questions, prefill_chunk):
    found = answer(model, context, questions, max_new_tokens=6, stop_ids=(), prefill_chunk=prefill_chunk)

    wanted = [plain(model, context, question, 6) for question in questions]
    assert found == wanted
    assert len({tuple(ids) for ids in wanted}) == len(questions), "equal answers would hide a mix-up"


def test_answers_equal_generate_of_transformers(context, questions):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    model.generation_config.eos_token_id = None
    for question in questions:
        ids = torch.from_numpy(np.concatenate([context, question]).astype(np.int64))[None]
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        assert answer(model, context, [question], max_new_tokens=6, stop_ids=()) == [whole[0, ids.shape[1] :].tolist()]


def test_no_question_sees_another(model, context, questions):
    options = {"max_new_tokens": 6, "stop_ids": ()}
    together = answer(model, context, questions, **options)

    order = [2, 0, 3, 1]
    permuted = answer(model, context, [questions[at] for at in order], **options)
    assert permuted == [together[at] for at in order]
    assert answer(model, context, [questions[1]] * 3, **options) == [together[1]] * 3


def test_a_stop_token_ends_an_answer_and_is_left_out(model, context, questions):
    free = answer(model, context, questions, max_new_tokens=8, stop_ids=())
    stop = free[0][3]

    stopped = answer(model, context, questions, max_new_tokens=8, stop_ids={stop})

    cut = [ids[: ids.index(stop)] if stop in ids else ids for ids in free]
    assert stopped == cut
    assert len(stopped[0]) <= 3


def test_an_answer_may_be_empty(model, context, questions):
    first = answer(model, context, questions[:1], max_new_tokens=1, stop_ids=())[0][0]

    assert answer(model, context, [questions[0], questions[0]], max_new_tokens=4, stop_ids={first}) == [[], []]


def test_logits_are_made_for_one_position_only(context, questions):
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[-2]))

    answer(model, context, questions, max_new_tokens=2, stop_ids=())

    assert set(rows) == {1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_answers_on_cuda_in_bfloat16_do_not_depend_on_other_questions(context, questions):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().to("cuda", torch.bfloat16)
    together = answer(model, context, questions, max_new_tokens=6, stop_ids=())

    alone = [answer(model, context, [question], max_new_tokens=6, stop_ids=())[0] for question in questions]

    assert together == alone


LENGTH_DEPENDENT = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.0, 1.2, 1.5],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_the_whole_prompt_decides_about_its_rotation_and_not_a_chunk_of_it(kind):
    """Plain transformers sees each prompt at once; ours in chunks, below and above the original length of 64."""
    options = {"rope_parameters": LENGTH_DEPENDENT[kind], "max_position_embeddings": 64}
    ours = made("unspool", **options)
    decide_by_document(ours)
    rng = np.random.default_rng(0)
    context = rng.integers(1, 97, 50)
    questions = [rng.integers(1, 97, size) for size in (4, 13, 15, 40, 150, 8)]
    wanted = []
    for ids in questions:
        plain = made("sdpa", **options)  # a new one: `dynamic` remembers the longest input
        wanted.append([int(plain(torch.tensor([[*context, *ids]])).logits[0, -1].argmax())])
    assert answer(ours, context, questions, max_new_tokens=1, stop_ids=(), prefill_chunk=16) == wanted
    assert [
        answer(ours, context, [ids], max_new_tokens=1, stop_ids=(), prefill_chunk=16)[0] for ids in questions
    ] == wanted
