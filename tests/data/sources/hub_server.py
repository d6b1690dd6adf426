"""A Hub on the loopback interface that serves one folder as the dataset org/name, and counts what it sends."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent = 0  # bytes of files
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                if path.startswith("/api/datasets/org/name/tree/"):
                    self.answer(json.dumps(hub.entries()).encode())
                elif path.startswith("/api/datasets/org/name"):
                    siblings = [{"rfilename": entry["path"]} for entry in hub.entries()]
                    self.answer(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode())
                elif match := re.fullmatch(r"/datasets/org/name/resolve/\w+/(.*)", path):
                    self.send_file(hub.folder / match[1])
                else:
                    self.send_error(404)

            do_HEAD = do_GET  # noqa: N815

            def do_POST(self) -> None:  # paths-info
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                wanted = json.loads(body)["paths"] if body.startswith("{") else re.findall(r"paths=([^&]+)", body)
                names = {unquote(name) for name in ([wanted] if isinstance(wanted, str) else wanted)}
                self.answer(json.dumps([entry for entry in hub.entries() if entry["path"] in names]).encode())

            def send_file(self, file: Path) -> None:
                data = file.read_bytes()
                found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                start = int(found[1]) if found else 0
                stop = int(found[2]) + 1 if found and found[2] else len(data)
                extra = {"ETag": f'"{hub.blob(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
                if found:
                    extra["Content-Range"] = f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"
                if self.command == "GET":
                    hub.sent += len(data[start:stop])
                self.answer(data[start:stop], 206 if found else 200, extra)

            def answer(self, data: bytes, code: int = 200, extra: dict[str, str] | None = None) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                for name, value in (extra or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def blob(self, file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def entries(self) -> list[dict[str, Any]]:
        files = sorted(file for file in self.folder.rglob("*") if file.is_file())
        return [
            {
                "type": "file",
                "path": file.relative_to(self.folder).as_posix(),
                "size": file.stat().st_size,
                "oid": self.blob(file),
            }
            for file in files
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
