"""Paths are relative to the recipe first, then to the current folder; `asset:` is in the package."""

import pytest

from unspool.core.errors import ConfigError
from unspool.models import location
from unspool.models.location import resolve_path


@pytest.fixture
def assets(tmp_path, monkeypatch):
    folder = tmp_path / "assets"
    (folder / "demo").mkdir(parents=True)
    (folder / "demo" / "train.jsonl.zst").write_bytes(b"")
    (tmp_path / "secret").write_text("")
    monkeypatch.setattr(location, "ASSETS", folder)
    return folder


def test_a_path_next_to_the_recipe_has_priority_over_the_current_folder(tmp_path, monkeypatch):
    root, here = tmp_path / "root", tmp_path / "here"
    for folder in (root, here):
        folder.mkdir()
        (folder / "a.txt").write_text("")
    (here / "b.txt").write_text("")
    monkeypatch.chdir(here)
    assert resolve_path("a.txt", root) == str(root / "a.txt")
    assert resolve_path("*.txt", root) == str(root / "*.txt")
    assert resolve_path("b.txt", root) == "b.txt"
    assert resolve_path("org/name", root) == "org/name"
    assert resolve_path(str(here / "a.txt"), root) == str(here / "a.txt")


def test_an_asset_is_found_as_file_folder_or_glob(assets, tmp_path):
    for name in ("demo", "demo/train.jsonl.zst", "demo/*.zst"):
        assert resolve_path(f"asset:{name}", tmp_path) == str(assets / name)


def test_an_unknown_asset_is_refused_with_the_nearest(assets, tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'asset:demo/train\.jsonl\.zst'"):
        resolve_path("asset:demo/trian.jsonl.zst", tmp_path)


@pytest.mark.parametrize("name", ["../secret", "", "demo/../../secret"])
def test_an_asset_cannot_lead_out_of_the_package(name, assets, tmp_path):
    with pytest.raises(ConfigError, match="is not shipped"):
        resolve_path(f"asset:{name}", tmp_path)
