"""One POST of JSON, tried again where that may help.

Promise: what the user can mend (a wrong address, key or model) is told at once in one sentence; what passes (a busy
or restarting server, a broken line) is tried again with growing pauses; every attempt has a time limit.
"""

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unspool.base.errors import ConfigError, UnspoolError

# Answers of a server that may be others a moment later.
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
LONGEST_PAUSE = 60.0


@dataclass(frozen=True, kw_only=True)
class Patience:
    seconds: float = 600.0  # of one attempt
    attempts: int = 6
    pause: float = 1.0  # before the second attempt; doubled every time


def post(
    url: str,
    body: Mapping[str, Any],
    *,
    key: str | None,
    patience: Patience,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """What the server answers, as JSON."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = json.dumps(body).encode()
    problem = ""
    for attempt in range(patience.attempts):
        if attempt:
            # Not all at the same moment where many requests wait.
            pause = min(LONGEST_PAUSE, patience.pause * 2 ** (attempt - 1))
            sleep(pause * (0.5 + random.random() / 2))
        try:
            request = urllib.request.Request(url, data=data, headers=headers, method="POST")
            with urllib.request.urlopen(request, timeout=patience.seconds) as response:
                found = json.loads(response.read())
            if isinstance(found, dict):
                return found
            problem = "it answered JSON that is no object"
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code}: {_said(error)}"
            if error.code not in PASSING:
                raise ConfigError(
                    f"{url} refuses the request ({problem}). Check --url, --model-name and the key."
                ) from None
        except ValueError as error:
            if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                problem = "it answered something that is no JSON"
            else:
                raise ConfigError(f"--url {url} is no address; give one such as http://localhost:8000/v1.") from None
        except OSError as error:
            # Refused and broken connections and time limits, as themselves or as a URLError around them.
            problem = str(getattr(error, "reason", error)) or type(error).__name__
    raise UnspoolError(
        f"{url} gave no answer in {patience.attempts} attempts ({plain(problem)}). Start the server or raise "
        "--timeout, and run this again: what was answered is kept."
    )


def _said(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(2000).decode("utf-8", "replace")
    except OSError:
        return error.reason
    try:
        found = json.loads(text)
        inner = found.get("error", found)
        text = inner.get("message", text) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError):
        pass
    return plain(str(text)) or str(error.reason)


def plain(text: str, limit: int = 200) -> str:
    """The first line of what somebody else wrote, without what a terminal would obey."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return "".join(char for char in line.strip() if char.isprintable())[:limit]
