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
from functools import cache
from http.client import HTTPException, InvalidURL
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


class Passing(Exception):  # noqa: N818
    """An attempt that went wrong in a way that another may not: the kind that is counted, and what was said."""

    def __init__(self, kind: str, problem: str, retry_after: float | None = None) -> None:
        super().__init__(problem)
        self.kind, self.problem, self.retry_after = kind, problem, retry_after


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key is for the address it was given for, not for wherever that one points to."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect)


def post(
    url: str,
    body: Mapping[str, Any],
    *,
    key: str | None,
    patience: Patience,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """What the server answers, as JSON."""
    problem = ""
    for number in range(patience.attempts):
        try:
            return attempt(url, body, key=key, seconds=patience.seconds)
        except Passing as passing:
            problem = passing.problem
            if number + 1 < patience.attempts:
                sleep(pause_after(number, passing, patience))
    raise UnspoolError(
        f"{url} gave no answer in {patience.attempts} attempts ({plain(problem)}). Start the server or raise "
        "--timeout, and run this again: what was answered is kept."
    )


def pause_after(number: int, passing: Passing, patience: Patience) -> float:
    """Seconds to wait after attempt `number`, from 0; not all at the same moment where many requests wait."""
    pause = min(LONGEST_PAUSE, patience.pause * 2.0**number) * (0.5 + random.random() / 2)
    return max(pause, min(LONGEST_PAUSE, passing.retry_after or 0.0))


def attempt(url: str, body: Mapping[str, Any], *, key: str | None, seconds: float) -> dict[str, Any]:
    """One POST; Passing where another attempt may help, ConfigError where only the user can."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers, method="POST")
        with _opener().open(request, timeout=seconds) as response:
            found = json.loads(response.read())
    except urllib.error.HTTPError as error:
        problem = f"HTTP {error.code}: {_said(error, key)}"
        if error.code not in PASSING:
            raise ConfigError(
                f"{url} refuses the request ({problem}). Check --url, --model-name and the key."
            ) from None
        raise Passing(f"http_{error.code}", problem, _seconds(error.headers.get("Retry-After"))) from None
    except InvalidURL:
        raise ConfigError(f"--url {url} is no address; give one such as http://localhost:8000/v1.") from None
    except HTTPException as error:
        raise Passing("closed", f"the answer broke off ({type(error).__name__})") from None
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            raise Passing("garbage", "it answered something that is no JSON") from None
        raise ConfigError(f"--url {url} is no address; give one such as http://localhost:8000/v1.") from None
    except OSError as error:
        # Refused and broken connections and time limits, as themselves or as a URLError around them.
        cause = getattr(error, "reason", error)
        kind = "timeout" if isinstance(cause, TimeoutError) else "connection"
        raise Passing(kind, str(cause) or type(cause).__name__) from None
    if not isinstance(found, dict):
        raise Passing("garbage", "it answered JSON that is no object")
    return found


def _seconds(said: str | None) -> float | None:
    """What `Retry-After` asks for; dates are left to our own pauses."""
    try:
        return max(0.0, float(said)) if said is not None else None
    except ValueError:
        return None


def _said(error: urllib.error.HTTPError, key: str | None) -> str:
    try:
        text = error.read(2000).decode("utf-8", "replace")
    except (OSError, HTTPException):
        return str(error.reason)
    try:
        found = json.loads(text)
        inner = found.get("error", found)
        text = inner.get("message", text) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError):
        pass
    # Some servers repeat what they were sent.
    return plain(str(text).replace(key, "…") if key else str(text)) or str(error.reason)


def plain(text: str, limit: int = 200) -> str:
    """The first line of what somebody else wrote, without what a terminal would obey."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return "".join(char for char in line.strip() if char.isprintable())[:limit]
