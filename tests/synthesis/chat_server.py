"""A program: serves a model over OpenAI's chat interface with plain `transformers`, on a free port of loopback.

    python chat_server.py FOLDER_OR_GGUF

Prints its address, then answers until it is killed. For tests: one request at a time, on the CPU.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(ref: str) -> tuple[Any, Any]:
    path = Path(ref)
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = str(path.parent) if where else ref
    tokenizer = AutoTokenizer.from_pretrained(folder, **where)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    return model.eval(), tokenizer


def main() -> None:
    model, tokenizer = load(sys.argv[1])

    def complete(body: dict[str, Any]) -> dict[str, Any]:
        found = tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = found["input_ids"]
        torch.manual_seed(0)
        options = (
            {"do_sample": True, "temperature": body["temperature"]} if body["temperature"] else {"do_sample": False}
        )
        with torch.inference_mode():
            made = model.generate(
                ids, max_new_tokens=body["max_tokens"], pad_token_id=tokenizer.eos_token_id, **options
            )
        new = made[0, ids.shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        reason = "length" if len(new) >= body["max_tokens"] else "stop"
        usage = {"prompt_tokens": int(ids.shape[1]), "completion_tokens": len(new)}
        return {"choices": [{"message": {"content": text}, "finish_reason": reason}], "usage": usage}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps(complete(body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
