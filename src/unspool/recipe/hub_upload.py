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
    """`HubUpload("me/my-model")(folder)`: checks the name and the login at once, before hours of work."""

    def __init__(self, repo: str, *, private: bool = False) -> None:
        self._repo, self._private, self._api = repo, private, HfApi(library_name="unspool")
        if "/" not in repo or not HUB_ID.fullmatch(repo):
            raise ConfigError(f"`push` {one_line(repo)!r} is no id of a Hub repository; write USER/NAME.")
        try:
            self._api.whoami()
        except (LocalTokenNotFoundError, HfHubHTTPError) as error:
            raise ConfigError(
                f"`push={repo!r}`: the Hub does not know you ({first_line(error)}); log in with `hf auth login`, or "
                "set HF_TOKEN to a token that may write."
            ) from error
        except OSError as error:
            raise ConfigError(f"`push={repo!r}`: the Hub cannot be reached ({first_line(error)}).") from error

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
