from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithFlattening

from factory import build_model, random_row
from unspool.core.errors import ConfigError, DataError
from unspool.training.collator import Collator

ROW = random_row((5, 3), 1, mask=0.3)
# Factors of LongRoPE for the small models' heads.
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **FACTORS}


def test_a_row_of_hf_columns_gives_the_batch_of_the_row_itself():
    batch = Collator()([ROW])
    item = {"input_ids": ROW.tokens.tolist(), "seq_lengths": [5, 3], "labels": batch["labels"][0].tolist()}
    found = Collator()([item | {"position_ids": [0, 1, 2, 3, 4, 0, 1, 2]}])

    assert found.keys() == batch.keys()
    for name, value in batch.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name


def test_every_micro_batch_of_a_step_knows_the_labels_of_the_whole_step():
    rows = [ROW, random_row((8,), 2)]
    step = Collator().step(rows)

    counts = [int((batch["shift_labels"] != -100).sum()) for batch in step]
    assert len(set(counts)) == 2, "equal counts would hide a mix-up"
    assert [batch["num_items_in_batch"] for batch in step] == [sum(counts)] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lengths": None}, "no seq_lengths"),
        ({"seq_lengths": [5, 2]}, "add up to 7"),
        ({"labels": [2, 3, 4, 5, 6, 7, 8, -100]}, "shifted"),
    ],
)
def test_rows_that_would_train_on_something_else_are_refused(change, message):
    item = {"input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "seq_lengths": [5, 3]} | change
    item = {name: value for name, value in item.items() if value is not None}

    with pytest.raises(DataError, match=message):
        Collator()([item])


def test_skipped_positions_need_an_attention_that_knows_documents():
    row = replace(random_row((8,), 1), positions=np.array([0, 1, 2, 3, 20, 21, 22, 23]))

    assert Collator(build_model())([row])["doc_lens"] == (8,)
    for model, message in ((None, "Collator\\(model\\)"), (build_model(attention="sdpa"), "unspool")):
        with pytest.raises(ConfigError, match=message):
            Collator(model)([row])


def test_frequencies_that_depend_on_the_length_need_a_model_loaded_by_us():
    model = build_model(rope_parameters=LONGROPE)

    with pytest.raises(ConfigError, match=r"unspool\.load"):
        Collator(model)
    with pytest.raises(ConfigError, match=r"unspool\.load"):
        model(**Collator()([ROW]))


def test_rows_of_another_collator_keep_their_documents_apart_with_our_attention():
    """They only have positions that restart."""
    documents = [ROW.tokens[:5].tolist(), ROW.tokens[5:].tolist()]
    batch = DataCollatorWithFlattening()([{"input_ids": ids} for ids in documents])
    alone = [build_model(attention="eager")(torch.tensor([ids])).logits for ids in documents]

    found = build_model()(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    torch.testing.assert_close(found, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="one sequence"):
        build_model()(input_ids=batch["input_ids"].repeat(2, 1), position_ids=batch["position_ids"].repeat(2, 1))
