"""Upload an exported folder to the Hugging Face Hub."""

import logging
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.formatting import one_line
from unspool.models.location import HUB_ID, first_line

logger = logging.getLogger(__name__)


class HubUpload:
    """`HubUpload("me/my-model")(folder)`: the constructor checks the name and the login, before hours of work."""

    def __init__(self, repo: str, *, private: bool = False) -> None:
        self._repo, self._private, self._api = repo, private, HfApi(library_name="unspool")
        if "/" not in repo or not HUB_ID.fullmatch(repo):
            raise ConfigError(f"`push` {one_line(repo)!r} is not a Hub repository id; write USER/NAME.")
        try:
            self._api.whoami()
        except (LocalTokenNotFoundError, HfHubHTTPError) as error:
            raise ConfigError(
                f"`push={repo!r}`: you are not logged in to the Hub ({first_line(error)}); run `hf auth login`, or set "
                "HF_TOKEN to a token with write access."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"`push={repo!r}`: the Hub cannot be reached ({first_line(error)}); check the network, or export "
                "without `push`."
            ) from error

    def __call__(self, folder: Path) -> str:
        """Upload the folder as one commit and return the address of the repository."""
        try:
            url = self._api.create_repo(self._repo, private=self._private, exist_ok=True)
            self._api.upload_folder(
                repo_id=self._repo, folder_path=folder, commit_message="Export of Unspool", ignore_patterns=["*.lock"]
            )
        except (HfHubHTTPError, OSError) as error:
            raise UnspoolError(
                f"`push={self._repo!r}`: the upload failed ({first_line(error)}). The export is complete in {folder}; "
                "run the same command again, or upload it with `hf upload`."
            ) from error
        logger.info(f"uploaded to {url}")
        return str(url)
