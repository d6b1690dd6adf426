"""A model's config as a plain dict, from a Hub id, a folder or a GGUF file, without its weights."""

import json
from pathlib import Path
from typing import Any

from unspool.core.errors import ConfigError
from unspool.models.tokenizer import first_line, location, quiet


def config_values(ref: str) -> dict[str, Any]:
    """All values with the defaults of the architecture, of the text part where there are several."""
    quiet()
    # Only now, since it takes seconds and not all who name a model need its config.
    from transformers import AutoConfig

    path = Path(ref) / "config.json"
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
        if "plain_type" in content:
            # A base per head: a model_type that only we know.
            kept = {key: value for key, value in content.items() if key not in ("model_type", "auto_map")}
            config = AutoConfig.for_model(content["plain_type"], **kept)
        else:
            config = AutoConfig.from_pretrained(**location(ref), trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"model {ref}: its config could not be read ({first_line(error)}).") from error
    values: dict[str, Any] = config.get_text_config().to_dict()
    return values
