from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

import unspool
from factory import CPU, build_model, save_folder
from unspool.core.errors import ConfigError
from unspool.data.corpus.store import CorpusReader, CorpusWriter
from unspool.data.packing.pack import Doc, Tally
from unspool.data.strategies.nextlong import NExtLong, build_negatives
from unspool.models.load import Embedder
from unspool.models.tokenizer import load_tokenizer

TINY = str(Path(unspool.__file__).parent / "assets" / "tiny-base")


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.uint32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Twice the context of the other models here, so that cutting to it shows.
    return str(save_folder(tmp_path_factory.mktemp("model"), build_model(max_position_embeddings=128)))


def test_a_vector_is_the_mean_of_the_last_states_whatever_is_beside_it(folder):
    embed = Embedder(folder, tokenizer=load_tokenizer(folder), device=CPU)
    texts = [array(5, 6, 7), array(*range(20, 60)), array(9)]
    together = embed(texts)

    model = AutoModel.from_pretrained(folder).eval()
    for text, vector in zip(texts, together, strict=True):
        with torch.no_grad():
            states = model(torch.from_numpy(text.astype(np.int64))[None]).last_hidden_state[0]
        np.testing.assert_allclose(vector, states.mean(dim=0).numpy(), atol=1e-5)
        np.testing.assert_allclose(vector, embed([text])[0], atol=1e-5)


def test_texts_beyond_the_context_are_cut(folder):
    embed = Embedder(folder, tokenizer=load_tokenizer(folder), device=CPU)
    text = np.random.default_rng(0).integers(250, size=300).astype(np.uint32)
    np.testing.assert_allclose(embed([text]), embed([text[:128]]), atol=1e-6)


def test_a_model_with_another_vocabulary_gets_the_text(folder):
    theirs, ours = load_tokenizer(folder), load_tokenizer(TINY)
    text = "the old mill by the river"
    direct = Embedder(folder, tokenizer=theirs, device=CPU)([array(*theirs(text)["input_ids"])])
    decoded = Embedder(folder, tokenizer=ours, device=CPU)([array(*ours(text)["input_ids"])])
    np.testing.assert_allclose(decoded, direct, atol=1e-5)


def test_a_folder_without_a_model_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"nextlong\.model .*could not be loaded"):
        Embedder(str(tmp_path), tokenizer=load_tokenizer(TINY), device=CPU)([array(1)])


def test_negatives_by_embeddings_of_the_bundled_model(tmp_path):
    tokenizer = load_tokenizer(TINY)
    subjects = ["The ship sailed over the stormy sea with all her crew.", "The cook put butter and eggs in the pan."]
    # Every document speaks of the sea first and of the kitchen then, in chunks of 64 tokens.
    halves = [np.array(tokenizer(text * 20)["input_ids"], dtype=np.uint32) for text in subjects]
    docs = [np.concatenate([half[shift : shift + 64] for half in halves]) for shift in range(4)]
    with CorpusWriter(tmp_path / "docs.arrow") as writer:
        for number, doc in enumerate(docs):
            writer.append(str(number), doc)
    readers = {"a": CorpusReader([tmp_path / "docs.arrow"])}
    config = NExtLong(chunk=64, longest=128, retriever="embeddings", model=TINY)
    built = build_negatives(
        config, readers, keep_rest=True, embed=Embedder(TINY, tokenizer=tokenizer, device=torch.device("cpu"))
    )
    # The subjects repeat themselves, so that all documents would be copies of each other.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unspool.data.strategies.nextlong.stretches", lambda text: {hash(text.tobytes())})
        rows = list(built.pack([Doc(doc, "a", number) for number, doc in enumerate(docs)], 384, Tally()))

    assert len(rows) == 4
    sea, kitchen = (set(half.tolist()) for half in halves)
    for row in rows:
        parts = np.split(row.tokens, np.cumsum(row.doc_lens)[:-1])
        about = ["sea" if set(part.tolist()) <= sea else "kitchen" for part in parts]
        assert about == ["sea"] * 3 + ["kitchen"] * 3
        assert row.chunk_ids.tolist()[0::3] == [0, 0] and set(parts[-1].tolist()) <= kitchen
