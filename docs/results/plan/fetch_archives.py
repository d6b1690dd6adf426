"""Download the source archives of the plan and check their sha256 (files.json): fetch_archives.py FOLDER

The index is PIP_INDEX_URL, pip's own setting, or PyPI.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

FILES = Path(__file__).with_name("files.json")
PREFIX = "sdists/"


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for path, sha256 in json.loads(FILES.read_text())["read"].items():
        if path.startswith(PREFIX):
            fetch(folder / path.removeprefix(PREFIX), sha256)


def fetch(path: Path, sha256: str) -> None:
    if not path.exists() or digest(path.read_bytes()) != sha256:
        page = f"{index()}/{re.sub(r'-[0-9].*', '', path.name)}/"
        links = re.findall(r'href="([^"]+)"', read(page).decode())
        link = next((one for one in links if path.name in one), None)
        if link is None:
            sys.exit(f"{page} does not list {path.name}; set PIP_INDEX_URL to an index that has it.")
        data = read(urljoin(page, link))
        if digest(data) != sha256:
            sys.exit(f"{path.name}: its sha256 is {digest(data)}, not {sha256}; nothing was written.")
        path.write_bytes(data)
    print(f"{path.name}: sha256 as stated", flush=True)


def index() -> str:
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    own = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return (os.environ.get("PIP_INDEX_URL") or own or "https://pypi.org/simple").rstrip("/")


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=180) as answer:
        found: bytes = answer.read()
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    main()
