"""A local Hub with one user: the requests of `huggingface_hub`'s client to create and fill a repository."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_secret"


class FakeHub:
    def __init__(self):
        self.repos = {}  # id: {"private": …, "files": {path: bytes}}
        self.uploads = {}  # oid: bytes
        self.fail_commits = False


@contextmanager
def fake_hub():
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def reply(self, value, code=200):
            body = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def body(self):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        @property
        def knows_user(self):
            return self.headers.get("Authorization") == f"Bearer {TOKEN}"

        def do_GET(self):
            if self.path == "/api/whoami-v2" and self.knows_user:
                return self.reply({"type": "user", "name": "me"})
            return self.reply({"error": "Invalid username or password."}, 401)

        def do_PUT(self):
            hub.uploads[self.path.removeprefix("/lfs/")] = self.body()
            return self.reply({})

        def do_POST(self):
            body = self.body()
            if not self.knows_user:
                return self.reply({"error": "Invalid username or password."}, 401)
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                name = f"me/{asked['name'].split('/')[-1]}"
                if name in hub.repos:
                    return self.reply({"error": "You already created this model repo", "url": f"{url}/{name}"}, 409)
                hub.repos[name] = {"private": asked.get("private") or asked.get("visibility") == "private", "files": {}}
                return self.reply({"url": f"{url}/{name}"})
            if self.path == "/api/validate-yaml":  # of the model card
                return self.reply({"errors": [], "warnings": []} if b"repoType" in body else {"errors": ["empty"]})
            if self.path.endswith("/preupload/main"):
                files = json.loads(body)["files"]
                modes = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in files
                ]
                return self.reply({"files": modes})
            if self.path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {**wanted, "actions": {"upload": {"href": f"{url}/lfs/{wanted['oid']}"}}}
                    for wanted in json.loads(body)["objects"]
                ]
                return self.reply({"transfer": "basic", "objects": objects})
            if "/commit/" in self.path:
                if hub.fail_commits:
                    return self.reply({"error": "out of order"}, 403)
                name = "/".join(self.path.split("/")[3:5])
                files = hub.repos[name]["files"]
                for line in body.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                    elif entry["key"] == "lfsFile":
                        files[entry["value"]["path"]] = hub.uploads[entry["value"]["oid"]]
                return self.reply({"success": True, "commitOid": "0" * 40, "commitUrl": f"{url}/{name}/commit/{0:040}"})
            return self.reply({"error": f"no such address {self.path}"}, 404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    hub.url = url
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
