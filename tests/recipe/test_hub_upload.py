"""`export --push` fills a repository of a Hub on this machine, through `huggingface_hub`'s own client."""

import huggingface_hub.constants
import pytest
from tests.recipe.fake_hub import TOKEN, fake_hub
from typer.testing import CliRunner

import unspool
from unspool.cli.main import build_app
from unspool.core.errors import ConfigError, UnspoolError
from unspool.models.location import ASSETS
from unspool.recipe.hub_upload import HubUpload


@pytest.fixture
def hub(monkeypatch):
    with fake_hub() as found:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


@pytest.fixture
def folder(tmp_path):
    files = {"README.md": b"---\nlicense: mit\n---\n# A card\n", "model.safetensors": b"weights" * 999, "a.lock": b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_a_folder_becomes_a_repository_with_its_card_and_weights(hub, folder):
    url = HubUpload("me/my-model-64k", private=True)(folder)

    repo = hub.repos["me/my-model-64k"]
    assert url == f"{hub.url}/me/my-model-64k" and repo["private"]
    assert repo["files"].keys() == {"README.md", "model.safetensors"}, "but no lock files"
    assert repo["files"]["model.safetensors"] == b"weights" * 999
    (folder / "README.md").write_text("# Another card")
    HubUpload("me/my-model-64k")(folder)
    assert repo["files"]["README.md"] == b"# Another card"


@pytest.mark.parametrize("name", ["my-model", "me/my model", "../me", "me/my/model", ""])
def test_a_wrong_name_is_refused_before_any_work(hub, name):
    with pytest.raises(ConfigError, match="is not a Hub repository id; write USER/NAME"):
        HubUpload(name)


def test_a_wrong_login_is_refused_before_any_work(hub, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match=r"you are not logged in to the Hub .* run `hf auth login`"):
        unspool.export(ASSETS / "tiny-base", tmp_path / "out", push="me/my-model")
    assert not (tmp_path / "out").exists() and not hub.repos


def test_a_failed_upload_says_that_the_export_is_complete(hub, folder):
    hub.fail_commits = True
    with pytest.raises(UnspoolError, match=r"the upload failed .* The export is complete in"):
        HubUpload("me/my-model")(folder)


@pytest.mark.slow
def test_the_command_exports_and_uploads(hub, tmp_path):
    arguments = ["export", ASSETS / "tiny-base", tmp_path / "out", "--push", "me/tiny", "--device", "cpu"]
    done = CliRunner().invoke(build_app(), [str(argument) for argument in arguments])

    assert done.exit_code == 0, done.output
    assert f"Uploaded: {hub.url}/me/tiny" in done.stdout
    files = hub.repos["me/tiny"]["files"]
    assert {"README.md", "config.json", "tokenizer.json", "model.safetensors"} <= files.keys()
    assert files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert b"library_name: transformers" in files["README.md"]
