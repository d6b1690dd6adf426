"""Rows in the formats of others have the same ids and boundaries, and a warning names what a format cannot hold."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import unspool
from unspool.core.errors import ConfigError
from unspool.data.packing.formats import FORMATS, MARK
from unspool.data.packing.row import IGNORE
from unspool.data.sources.mds import MdsSource

TEXTS = ["The sea was calm and the ship went on, as it had for days. " * count for count in (3, 9, 30, 1, 12, 40)]
READERS = Path(__file__).with_name("format_readers.py")
# An interpreter that has datasets, mosaicml-streaming and megatron-core, where this one has not.
PYTHON = os.environ.get("UNSPOOL_FORMATS_PYTHON", sys.executable)
STRATEGIES = {
    "plain": {"packing": "best_fit"},
    "utk": {"strategy": unspool.UtK(min_split=16, probability=1.0)},
    "pose": {"strategy": unspool.PoSE(target="1K")},
}


@pytest.fixture(scope="module")
def tokenizer():
    return unspool.load("asset:tiny-base", device="cpu")[1]


@pytest.fixture(scope="module", params=STRATEGIES)
def dataset(request, tokenizer):
    return unspool.pack(TEXTS * 3, tokenizer, seq_len=128, **STRATEGIES[request.param])


def columns_of(dataset):
    return [{name: value.tolist() for name, value in dataset.columns(at).items()} for at in range(len(dataset))]


def mds_of(dataset):
    """The columns of an MDS sample, from those of stock trainers."""
    expected = []
    for row, found in zip(dataset, columns_of(dataset), strict=True):
        ends = np.cumsum(found["seq_lengths"])
        spans = np.stack([ends - found["seq_lengths"], ends], axis=1).tolist()
        mask = [int(label != IGNORE) for label in found["labels"]]
        sample = {"indices": spans, "input_ids": found["input_ids"], "mask": mask}
        expected.append(sample | ({} if row.positions is None else {"position_ids": found["position_ids"]}))
    return expected


def documents_of(dataset):
    return [[part.tolist() for part in np.split(row.tokens, np.cumsum(row.doc_lens)[:-1])] for row in dataset]


def test_arrow_and_parquet_have_the_columns_of_stock_trainers(dataset, tmp_path):
    arrow = dataset.save(tmp_path / "arrow", "arrow")
    with pa.ipc.open_stream(next(arrow.glob("*.arrow"))) as stream:
        assert stream.read_all().to_pylist() == columns_of(dataset)
    parquet = dataset.save(tmp_path / "parquet", "parquet")
    assert pq.read_table(next(parquet.glob("*.parquet"))).to_pylist() == columns_of(dataset)


def test_mds_is_read_back_by_our_own_source(dataset, tmp_path):
    folder = dataset.save(tmp_path / "mds", "mds")
    source = MdsSource(kind="mds", path=str(folder))
    found = list(source.read_units(source.units(Path())))
    parts = [(sample, span) for sample in mds_of(dataset) for span in sample["indices"]]
    assert [each.tokens.tolist() for each in found] == [sample["input_ids"][slice(*span)] for sample, span in parts]
    assert [each.loss_mask.tolist() for each in found] == [sample["mask"][slice(*span)] for sample, span in parts]


def test_megatron_warns_of_what_it_cannot_hold(dataset, tmp_path, caplog):
    dataset.save(tmp_path / "megatron", "megatron")
    assert "--reset-attention-mask" in caplog.text
    lost = "attention across the chunks of a row and loss masks" if dataset[0].attention == "full" else "loss masks"
    lost = lost if dataset[0].positions is None else "position ids"
    assert f"the format cannot store {lost}; they are lost" in caplog.text


def test_a_second_time_nothing_is_written_and_other_files_are_never_lost(tokenizer, tmp_path):
    dataset = unspool.pack(TEXTS, tokenizer, seq_len=128)
    folder = dataset.save(tmp_path / "rows", "parquet")
    before = [file.stat().st_mtime_ns for file in sorted(folder.iterdir())]
    dataset.save(folder, "parquet")
    assert [file.stat().st_mtime_ns for file in sorted(folder.iterdir())] == before and (folder / MARK).is_file()
    dataset.save(folder, "mds")
    assert not list(folder.glob("*.parquet"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds other files"):
        dataset.save(tmp_path / "mine", "parquet")
    with pytest.raises(ConfigError, match="Did you mean 'parquet'"):
        dataset.save(tmp_path / "x", "parket")


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_back_by_its_own_library(name, dataset, tmp_path):
    folder = dataset.save(tmp_path / name, name)
    module = {"mds": "streaming", "megatron": "megatron.core"}.get(name, "datasets")
    if subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True).returncode:
        pytest.skip(f"{module} is not installed; set UNSPOOL_FORMATS_PYTHON to an interpreter that has it")
    command = [PYTHON, "-P", str(READERS), name, str(folder)]  # -P: this folder has a package called tokenize
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    expected = {"mds": mds_of, "megatron": documents_of}.get(name, columns_of)(dataset)
    assert json.loads(done.stdout.splitlines()[-1]) == expected


@pytest.mark.slow
def test_rows_become_a_dataset_of_hugging_face_and_scores_a_data_frame(tokenizer, tmp_path):
    if subprocess.run([PYTHON, "-c", "import datasets, pandas"], capture_output=True).returncode:
        pytest.skip("datasets and pandas are not installed; set UNSPOOL_FORMATS_PYTHON to an interpreter that has them")
    dataset = unspool.pack(TEXTS, tokenizer, seq_len=128, out=tmp_path / "rows")
    code = f"""
        import json, unspool
        dataset = unspool.PackedDataset({str(tmp_path / "rows")!r})
        frame = unspool.evaluate("asset:tiny-base", "niah", [256], samples=2, backend="oracle").to_frame()
        packed = unspool.pack(dataset.to_hf(), unspool.load("asset:tiny-base")[1], seq_len=128)
        print(json.dumps([[dict(row) for row in dataset.to_hf()], frame["value"].max(), len(packed)]))
    """
    env = os.environ | {"PYTHONPATH": str(Path(unspool.__file__).parents[1]), "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run([PYTHON, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    rows, best, count = json.loads(done.stdout.splitlines()[-1])
    assert rows == columns_of(dataset) and best == 1.0 and count == len(dataset)
