"""Find a model: in a folder, a GGUF file, the folder of a run or stage, or on the Hub. Imports no torch.

A name that is not a path is requested from the Hub once, with a timeout of seconds; `transformers` would retry for a
minute. Errors give the Hub's answer and name similar models: local folders, cached repositories and shipped models.
"""

import glob
import logging
import re
import threading
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from unspool.core.artifacts import WORK_ENDINGS, read_manifest
from unspool.core.config import did_you_mean
from unspool.core.errors import ConfigError
from unspool.core.formatting import join_words, one_line

logger = logging.getLogger(__name__)

ASSETS = Path(__file__).parents[1] / "assets"
ASSET_PREFIX = "asset:"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
GGUF = ".gguf"
CONFIG = "config.json"
_FILES = (CONFIG, "tokenizer.json", "tokenizer_config.json")
HUB_SECONDS = 5.0  # timeout of the request that checks whether the Hub has a model
_SIMILAR = 0.7  # names with at least this share of common characters are suggested
_MAX_SUGGESTIONS = 3


def location(ref: str) -> dict[str, str]:
    """Return the arguments of `from_pretrained` that locate a model; ConfigError if it does not exist."""
    path = Path(ref)
    if not exists(path):
        return {"pretrained_model_name_or_path": _on_hub(ref)}
    if path.suffix == GGUF:
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": ref}


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long or contains a null byte, or a folder without permission
        return False


def short_name(ref: str) -> str:
    """Return a short name of a model: RUN/STAGE in a run's folder, else the last part of its path or Hub id."""
    parts = Path(ref).absolute().parts
    if parts[-3:-2] == ("stages",) and parts[-1] == "model" and len(parts) > 4:
        return f"{parts[-4]}/{parts[-2]}"
    return Path(ref).name or ref


# Paths as users write them


def resolve_path(value: str, root: Path) -> str:
    """Return the path to open: `asset:…` in the package, else relative to the recipe if that exists, else unchanged.

    A path that does not exist is returned unchanged, because it may be a Hub id.
    """
    if value.startswith(ASSET_PREFIX):
        return _asset(value.removeprefix(ASSET_PREFIX))
    path = expand_home(value)
    beside = root / path
    return str(beside if not path.is_absolute() and path_exists(str(beside)) else path)


def model_path(value: str, root: Path) -> str:
    """Return the path of a model or tokenizer; for the folder of a run or stage, the path of its model."""
    path = resolve_path(value, root)
    return str(final_model(Path(path))) if path_exists(path) else path


def path_exists(path: str) -> bool:
    """Return whether a file, a folder or a match of a glob pattern exists."""
    matches = glob.iglob(path, recursive=True) if glob.has_magic(path) else iter(())  # noqa: PTH207 (absolute)
    try:
        return Path(path).exists() or next(matches, None) is not None
    except OSError:  # a name that is too long, or a folder without permission
        return False


def expand_home(value: str) -> Path:
    try:
        return Path(value).expanduser()
    except RuntimeError:  # ~name of an unknown user
        return Path(value)


def _asset(name: str) -> str:
    path = ASSETS / name
    if name and ASSETS.resolve() in path.resolve().parents and path_exists(str(path)):
        return str(path)
    shipped = sorted(file.relative_to(ASSETS).as_posix() for file in ASSETS.rglob("*"))
    hint = did_you_mean(name, shipped, prefix=ASSET_PREFIX)
    raise ConfigError(f"{ASSET_PREFIX + name!r} is not shipped with unspool{hint}")


# Folders of runs


def final_model(path: Path) -> Path:
    """Return the model folder of a run (from its last stage) or stage; other paths are returned unchanged.

    ConfigError if the run is not finished, if it ends in several stages, or if a folder holds no model and no
    tokenizer.
    """
    if not path.is_dir() or any((path / name).is_file() for name in _FILES):
        return path
    run_dir = path.parent if path.name == "stages" and (path.parent / "recipe.yaml").is_file() else path
    if (run_dir / "stages").is_dir() or (run_dir / "recipe.yaml").is_file():
        return _announced(path, run_dir / "stages" / _final_stage(run_dir) / "model")
    if path.name.endswith(".work") and path.parent.name == "stages":
        raise ConfigError(f"{path}: this stage is still being trained; run the recipe to its end first.")
    if (path / "model" / CONFIG).is_file():
        return _announced(path, path / "model")
    raise ConfigError(f"{path}: the folder holds no model ({CONFIG}); give the folder of a model, a run or a stage.")


def _announced(given: Path, model: Path) -> Path:
    _announce_once(given, model, Path.cwd())
    return model


@cache
def _announce_once(given: Path, model: Path, folder: Path) -> None:
    logger.info(f"{given}: using the model in {model}")


def _final_stage(run_dir: Path) -> str:
    stages = run_dir / "stages"
    trained = [folder.name for folder in sorted(stages.glob("*")) if is_trained(folder)]
    if not trained:
        raise ConfigError(f"{run_dir}: no stage of this run is trained yet; run the recipe first.")
    parents = _stage_parents(run_dir / "recipe.yaml") or dict.fromkeys(trained, "")
    missing = [name for name in parents if name not in trained]
    if missing:
        raise ConfigError(
            f"{run_dir}: the run is not finished, since stage {missing[0]} is not trained; run the recipe to its end, "
            f"or give a trained stage, such as {stages / trained[-1]}."
        )
    final = [name for name in parents if name not in parents.values()]
    if len(final) > 1:
        raise ConfigError(
            f"{run_dir}: the run ends in {len(final)} models ({join_words(final)}); give one of them, such as "
            f"{stages / final[-1]}."
        )
    return final[0]


def is_trained(stage: Path) -> bool:
    """Return whether a stage's folder is published and holds a model."""
    is_published = not stage.name.endswith(WORK_ENDINGS) and (read_manifest(stage) or {}).get("kind") == "stage"
    return is_published and (stage / "model" / CONFIG).is_file()


def _stage_parents(recipe: Path) -> dict[str, str]:
    """Return the stages of a recipe in order, each with its parent stage; empty if the file cannot be read."""
    try:
        entries = yaml.safe_load(recipe.read_text(encoding="utf-8"))["stages"]
        names = [str(entry["name"]) for entry in entries]
        starts = [str(entry.get("init", "previous")) for entry in entries]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return {}
    previous = ["", *names]
    return {name: previous[at] if starts[at] == "previous" else starts[at] for at, name in enumerate(names)}


# The Hub

_OFFLINE = "offline mode is set (HF_HUB_OFFLINE), so the Hub was not contacted", "unset it, or give a local folder"
_NETWORK = "check the network and HF_ENDPOINT, or give a local folder"


@cache
def _on_hub(ref: str) -> str:
    """Return the source for `from_pretrained`: the Hub id, or its cached folder if the Hub cannot be reached."""
    if not HUB_ID.fullmatch(ref) or Path(ref).suffix == GGUF:
        raise ConfigError(f"model {one_line(ref)}: no such file or folder; correct the path.{suggestion(ref)}")
    from huggingface_hub import constants, try_to_load_from_cache

    cached = try_to_load_from_cache(ref, CONFIG)
    if constants.HF_HUB_OFFLINE and isinstance(cached, str):
        return ref
    problem = _OFFLINE if constants.HF_HUB_OFFLINE else _hub_problem(ref, constants.ENDPOINT)
    if problem is None:
        return ref
    what, remedy = problem
    if isinstance(cached, str):
        logger.warning(f"model {ref}: {what}; using the copy in the cache")
        return str(Path(cached).parent)
    raise ConfigError(
        f"model {ref}: not a folder here and not in the Hub's cache, and {what}; {remedy}.{suggestion(ref)}"
    )


def _hub_problem(ref: str, endpoint: str) -> tuple[str, str] | None:
    """Request a model's config from the Hub once; return the problem and its remedy, None if the model is there."""
    import huggingface_hub

    hub: Any = huggingface_hub.utils
    host = urlsplit(endpoint).netloc.rpartition("@")[2]
    seconds = min(HUB_SECONDS, huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT)
    late = f"{host} did not answer within {seconds:g} seconds", _NETWORK
    answers: list[tuple[str, str] | None] = [late]

    def ask() -> None:
        try:
            url = huggingface_hub.hf_hub_url(ref, CONFIG, endpoint=endpoint)
            reply = hub.get_session().head(url, headers=hub.build_hf_headers(), timeout=seconds)
            hub.hf_raise_for_status(reply)
            answers[0] = None
        except Exception as error:  # of three HTTP libraries without a common base class
            if "Timeout" not in type(error).__name__:
                answers[0] = _explain_refusal(error, f"{endpoint}/{ref}", host)

    # In a separate thread, because looking up a host's address has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0]


def _explain_refusal(error: Exception, url: str, host: str) -> tuple[str, str] | None:
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, EntryNotFoundError):
        return None  # the repository exists; `transformers` reports the missing file
    if isinstance(error, GatedRepoError):
        return f"{host} gives it only to users who accepted its terms", (
            f"accept them at {url} and log in with `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        remedy = "check the name, or log in with `hf auth login` if it is private"
        return f"{host} has no such model, or it is private ({status})", remedy
    if status == 401:
        return f"{host} refused your access token (401)", "log in again with `hf auth login`, or correct HF_TOKEN"
    if status == 403:
        return f"{host} refused access to it (403)", "use an access token with read access to it (`hf auth login`)"
    if status is not None:
        return f"{host} answered with an error ({status})", "try again later, or give a local folder"
    return f"{host} cannot be reached ({first_line(error)})", _NETWORK


# Similar names


def suggestion(ref: str) -> str:
    """Return a sentence that names up to three similar models, the most similar first; empty if there is none."""
    known = [*_local_paths(ref), *_cached_models(), *_shipped_models()]
    scored = sorted(((_similarity(ref, name), name, where) for name, where in known), key=lambda one: -one[0])
    names = [f"{name} ({where})" for score, name, where in scored if score >= _SIMILAR]
    return f" Did you mean {' or '.join(names[:_MAX_SUGGESTIONS])}?" if names else ""


def _similarity(ref: str, name: str) -> float:
    """Return the share of common characters of two names, with or without folder or owner, whichever is higher."""
    first, second = ref.lower(), name.lower().removeprefix(ASSET_PREFIX)
    short = Path(first).name, Path(second).name
    if "/" in first.strip("/") and "/" in second.strip("/"):
        return SequenceMatcher(None, first, second).ratio()
    return max(SequenceMatcher(None, *pair).ratio() for pair in ((first, second), short))


def _local_paths(ref: str) -> Iterator[tuple[str, str]]:
    """Return siblings of the first missing part of `ref`, each with the rest of `ref` if that path exists."""
    path = Path(ref)
    *_, missing = [path, *(part for part in path.parents if not exists(part))]
    rest = path.relative_to(missing)
    try:
        beside = sorted(missing.parent.iterdir())
    except OSError:
        return
    for other in beside:
        if (other.is_dir() or other.suffix == GGUF) and not other.name.startswith("."):
            yield str(other / rest if exists(other / rest) else other), "here"


def _cached_models() -> Iterator[tuple[str, str]]:
    from huggingface_hub import constants

    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        yield folder.name.removeprefix("models--").replace("--", "/"), "in the Hub's cache"


def _shipped_models() -> Iterator[tuple[str, str]]:
    for config in sorted(ASSETS.glob(f"*/{CONFIG}")):
        yield ASSET_PREFIX + config.parent.name, "shipped"


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if not lines or isinstance(error, KeyError):
        # A KeyError contains only the key.
        return " ".join([type(error).__name__, *lines[:1]])
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
