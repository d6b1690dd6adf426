"""The only HTTP client: JSON requests with limits on time and size, retries, and keys that stay secret.

A server may be slow, broken or hostile. It must send the first byte within `seconds`, the last one within another
`transfer` seconds, and at most `reply_bytes` in total. Redirects are refused, since they would send the key and the
prompts elsewhere. The key is read from its environment variable for each request and sent only in the header. It is
removed from everything that the server returns.
"""

import base64
import html
import io
import json
import math
import os
import random
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.sizes import format_count

KEY_ENV = "OPENAI_API_KEY"
# Status codes after which a retry may succeed.
TRANSIENT_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
MAX_PAUSE = 60.0  # of the backoff
MAX_RETRY_AFTER = 600.0  # a server that demands a longer pause ends the run
SLOW_KINDS = {"timeout", "too_large"}  # such an attempt may take many minutes
SLOW_ATTEMPTS = 2
MAX_DEPTH = 64  # nesting of a reply's JSON
MIN_SECRET = 8  # shorter keys are placeholders such as EMPTY, which an answer may contain
HIDDEN = "…"
_BLOCK = 1 << 16
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Limits of one attempt, and number of retries."""

    seconds: float = 600.0  # until the first byte of the reply
    transfer: float = 60.0  # from the first to the last byte
    connect: float = 10.0  # until the connection is open
    reply_bytes: int = 16 << 20
    attempts: int = 6
    pause: float = 1.0  # seconds before the second attempt; doubled for each retry


class TransientError(Exception):
    """A failed attempt that a retry may fix."""

    def __init__(self, kind: str, problem: str, retry_after: float | None = None) -> None:
        super().__init__(problem)
        self.kind, self.problem, self.retry_after = kind, problem, retry_after
        self.attempts = 1


class RefusedError(ConfigError):
    """An HTTP status that only the user can fix."""

    def __init__(self, status: int, problem: str, message: str) -> None:
        super().__init__(message)
        self.status, self.problem = status, problem


class _TooLargeError(Exception):
    """A reply larger than `reply_bytes`."""


def check_url(url: str) -> str:
    """Return the URL without a final slash; ConfigError if it is invalid or holds a password or key."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is not a number
    except ValueError:
        parts = urlsplit("")
    if set(url) & set("@?#"):
        raise ConfigError(
            f"{hide_credentials(url)}: a URL must not contain a user name, password or key, because URLs are "
            f"printed and stored. Put the key into the environment variable {KEY_ENV}, or the one that `key_env` "
            "names, and remove it from the URL."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or not url.isprintable():
        raise ConfigError(
            f"{printable_line(hide_credentials(url))} is not a valid URL; give one such as http://localhost:8000/v1."
        )
    return url.rstrip("/")


def check_server(url: str) -> None:
    """Refuse an address at which no server listens. Behind a proxy, nothing is known before the first request."""
    parts = urlsplit(check_url(url))
    if urllib.request.getproxies():
        return
    try:
        address = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection(address, timeout=RetryPolicy.connect).close()
    except OSError as error:
        raise ConfigError(f"no server listens at {url} ({error}); start it, or correct the address.") from error


def hide_credentials(url: str) -> str:
    """Remove user name, password and query from a URL."""
    url = re.sub(r"^(\w+://)?.*@", rf"\g<1>{HIDDEN}@", url, flags=re.DOTALL)
    return re.sub(r"([?#]).*", rf"\1{HIDDEN}", url, flags=re.DOTALL)


def read_key(key_env: str) -> str | None:
    """Read the key from an environment variable; ConfigError, without the key, if a header cannot hold it."""
    key = os.environ.get(key_env, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the API key in the environment variable {key_env} contains control or non-ASCII characters, which an "
            "HTTP header cannot hold; set it again without them."
        )
    return key or None


def request_json(
    url: str,
    body: Mapping[str, Any] | None,
    *,
    key_env: str = KEY_ENV,
    retry: RetryPolicy,
    parse: Callable[[dict[str, Any]], Result],
    sleep: Callable[[float], Any] = time.sleep,
) -> Result:
    """POST JSON (GET without a body), with retries, and return the reply after `parse`."""
    try:
        return with_retries(lambda: parse(request_once(url, body, key_env=key_env, retry=retry)), retry, sleep=sleep)
    except TransientError as error:
        raise no_answer(url, error) from None


def no_answer(url: str, error: TransientError) -> UnspoolError:
    tried = f"{error.attempts} attempt{'s' * (error.attempts > 1)}"
    return UnspoolError(
        f"{url} gave no usable answer in {tried} ({printable_line(error.problem)}). Start or repair the server, "
        "or raise `timeout` if it is slow, and run the same command again; finished answers are kept."
    )


def with_retries(
    call: Callable[[], Result],
    retry: RetryPolicy,
    *,
    sleep: Callable[[float], Any] = time.sleep,
    on_error: Callable[[TransientError], None] = lambda error: None,
) -> Result:
    """Call until it succeeds; raises the TransientError of the last attempt."""
    number = slow = 0
    while True:
        try:
            return call()
        except TransientError as error:
            on_error(error)
            number += 1
            slow += error.kind in SLOW_KINDS
            if number >= retry.attempts or slow >= SLOW_ATTEMPTS:
                error.attempts = number
                raise
            sleep(retry_delay(number - 1, error, retry))


def retry_delay(number: int, error: TransientError, retry: RetryPolicy) -> float:
    """Return seconds to wait after attempt `number`, from 0; random, so that requests do not retry all at once."""
    pause = min(MAX_PAUSE, retry.pause * 2.0**number) * (0.5 + random.random() / 2)
    return max(pause, error.retry_after or 0.0)


def request_once(
    url: str, body: Mapping[str, Any] | None, *, key_env: str = KEY_ENV, retry: RetryPolicy
) -> dict[str, Any]:
    """Send one request; TransientError if a retry may help, ConfigError if only the user can fix it."""
    check_url(url)
    key = read_key(key_env)
    headers = {"Content-Type": "application/json", "User-Agent": "unspool"}
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode(), headers=headers)
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    request.retry_policy = retry  # type: ignore[attr-defined]
    try:
        with _opener().open(request, timeout=min(retry.connect, retry.seconds)) as response:
            found = _clean(json.loads(_read(response, retry.reply_bytes)), key)
    except urllib.error.HTTPError as error:
        raise _refusal(url, error, key, key_env) from None
    except _TooLargeError:
        limit = format_count(retry.reply_bytes)
        raise TransientError("too_large", f"the reply is larger than {limit} bytes") from None
    except HTTPException as error:
        raise TransientError("closed", f"the reply was truncated ({type(error).__name__})") from None
    except RecursionError:
        raise TransientError("garbage", f"the reply is JSON nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:
        raise TransientError("garbage", "the reply is not JSON") from None
    except OSError as error:
        # Refused connections, broken connections and timeouts, either directly or inside a URLError.
        cause = getattr(error, "reason", error)
        kind = "timeout" if isinstance(cause, TimeoutError) else "connection"
        raise TransientError(kind, _foreign_line(str(cause), key) or type(cause).__name__) from None
    if not isinstance(found, dict):
        raise TransientError("garbage", "the reply is JSON but not an object")
    return found


# Limits


class _TimedReader(io.RawIOBase):
    """Read a socket until a fixed deadline, which small pieces do not extend."""

    def __init__(self, sock: Any, retry: RetryPolicy) -> None:
        self._sock, self._raw, self._retry = sock, sock.makefile("rb", buffering=0), retry
        self._first_by = time.monotonic() + retry.seconds
        self._received = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        by = self._first_by + (self._retry.transfer if self._received else 0.0)
        left = by - time.monotonic()
        problem = (
            f"the reply was not complete {self._retry.transfer:g} s after `timeout`"
            if self._received
            else f"no reply within {self._retry.seconds:g} s"
        )
        if left <= 0:
            raise TimeoutError(problem)
        self._sock.settimeout(left)
        try:
            count: int = self._raw.readinto(buffer)
        except TimeoutError:
            raise TimeoutError(problem) from None
        self._received += count
        if self._received > self._retry.reply_bytes:
            raise _TooLargeError
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


@dataclass(frozen=True)
class _TimedSocket:
    """The part of a socket that `HTTPResponse` uses."""

    sock: Any
    retry: RetryPolicy

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self.sock, self.retry), _BLOCK)


class _Timed(HTTPConnection):
    def __init__(self, *args: Any, retry: RetryPolicy, **options: Any) -> None:
        super().__init__(*args, **options)
        self._retry = retry

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(self._retry.seconds)  # for sending

    def response_class(  # type: ignore[override]
        self, sock: Any, *args: Any, **options: Any
    ) -> HTTPResponse:
        return HTTPResponse(_TimedSocket(sock, self._retry), *args, **options)  # type: ignore[arg-type]


class _TimedTls(_Timed, HTTPSConnection):
    pass


class _Handler(urllib.request.HTTPHandler):
    def do_open(self, http_class: Any, req: Any, **options: Any) -> Any:
        return super().do_open(partial(_Timed, retry=req.retry_policy), req, **options)


class _TlsHandler(urllib.request.HTTPSHandler):
    def do_open(self, http_class: Any, req: Any, **options: Any) -> Any:
        return super().do_open(partial(_TimedTls, retry=req.retry_policy), req, **options)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Handler, _TlsHandler, _NoRedirect)


def _read(response: Any, limit: int) -> bytes:
    # In blocks: otherwise the promised length would be allocated before any byte arrives.
    if (response.length or 0) > limit:
        raise _TooLargeError
    content = b"".join(iter(lambda: response.read(_BLOCK), b""))
    if response.length:
        raise IncompleteRead(content)
    return content


# Untrusted text


def _clean(value: Any, key: str | None, depth: int = 0) -> Any:
    """Remove the key and unpaired surrogates, which no file can hold, from a reply."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, str):
        if not value.isascii():
            value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return hide_key(value, key)
    if isinstance(value, list):
        return [_clean(one, key, depth + 1) for one in value]
    if isinstance(value, dict):
        return {hide_key(name, key): _clean(one, key, depth + 1) for name, one in value.items()}
    return value


def hide_key(text: str, key: str | None) -> str:
    """Remove a key, also in its URL, HTML and Base64 encodings."""
    return _forms(key).sub(HIDDEN, text) if key and len(key) >= MIN_SECRET else text


@cache
def _forms(key: str) -> re.Pattern[str]:
    forms = {key, quote(key, safe=""), quote(key), html.escape(key)}
    # Alone, and as the password of Basic authentication, where the user name shifts the Base64 groups of three bytes.
    for shift in range(3):
        coded = base64.b64encode(b"\0" * shift + key.encode()).decode().rstrip("=")
        forms.add(coded[4 * (shift > 0) : -2])
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))), re.IGNORECASE)


def printable_line(text: str, limit: int = 200) -> str:
    """Return the first line of an untrusted text, without control characters."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return "".join(char for char in line.strip() if char.isprintable())[:limit]


def _foreign_line(text: str, key: str | None) -> str:
    # Hide the key last, since invisible characters may split it.
    return hide_key(printable_line(text[:_BLOCK], limit=_BLOCK), key)[:200]


def _refusal(url: str, error: urllib.error.HTTPError, key: str | None, key_env: str) -> Exception:
    """Return the exception for an HTTP status that is not a success."""
    problem = f"HTTP {error.code}: {_error_message(error, key)}"
    if error.code in TRANSIENT_STATUS:
        wait = _retry_after(error.headers.get("Retry-After"))
        if wait is not None and wait > MAX_RETRY_AFTER:
            return UnspoolError(
                f"{url} demands a pause of {wait:.0f} s before the next request ({problem}). Run the command again "
                "after that; finished answers are kept."
            )
        return TransientError(f"http_{error.code}", problem, wait)
    if 300 <= error.code < 400:
        target = _foreign_line(hide_credentials(error.headers.get("Location") or "nowhere"), key)
        return RefusedError(
            error.code,
            problem,
            f"{url} redirects to {target} (HTTP {error.code}). Redirects are not followed, because key and prompts go "
            "only to the URL that you gave. If you trust the other URL, give it instead.",
        )
    remedy = "Check the URL, the model's name on the server and the key."
    if error.code in (401, 403):
        remedy = f"Check the key in the environment variable {key_env}{'' if key else ', which is not set'}."
    return RefusedError(error.code, problem, f"{url} refuses the request ({problem}). {remedy}")


def _retry_after(value: str | None) -> float | None:
    """Parse a `Retry-After` header, which holds seconds or a date; None if it holds neither."""
    try:
        seconds = float(value or "")
    except ValueError:
        try:
            at = parsedate_to_datetime(value or "")
        except (ValueError, TypeError, OverflowError):
            return None
        seconds = (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if not math.isnan(seconds) else None


def _error_message(error: urllib.error.HTTPError, key: str | None) -> str:
    try:
        text = error.read(_BLOCK).decode("utf-8", "replace")
    except (OSError, HTTPException, ValueError, _TooLargeError):
        text = ""
    try:
        found = json.loads(text)
        inner = found.get("error") or found.get("detail") or found
        text = inner.get("message", text) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError, RecursionError):
        if "<html" in text[:1000].lower() or "<!doctype" in text[:1000].lower():
            title = re.search(r"<title[^>]*>([^<]{1,300})</title", text, re.IGNORECASE)
            text = f"an HTML page{f', {html.unescape(title[1]).strip()!r}' if title else ''}"
    return _foreign_line(str(text), key) or _foreign_line(str(error.reason), key)
