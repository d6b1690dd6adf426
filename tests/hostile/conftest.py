"""A small working model folder, which tests damage."""

import pytest

from factory import build_model, save_folder

from .model_folders import TEXT


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("intact"), build_model(num_hidden_layers=2))


@pytest.fixture
def folder(intact, tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    for path in intact.iterdir():
        (made / path.name).write_bytes(path.read_bytes())
    (tmp_path / "text.txt").write_text(TEXT)
    return made
