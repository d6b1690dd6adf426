"""Run as a program, in a process of its own: the logits that plain `transformers` computes from a folder.

In, a line of JSON each: {"folder", "tokens": [ids], "device", "remote_code", "out"}. Out: the logits in fp32 in the
file `out`, and a line of JSON: {"error": null | text, "ours": whether anything of Unspool was loaded}.
Promise: imports torch and `transformers`, nothing else; exports.py starts it and asks.
"""

import json
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for line in sys.stdin:
        request = json.loads(line)
        error = None
        try:
            save_file({"logits": _logits(request)}, request["out"])
        except Exception as problem:  # whatever it is, it is the answer to the question asked
            error = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
        print(json.dumps({"error": error, "ours": "unspool" in sys.modules}), flush=True)


@torch.no_grad()
def _logits(request: dict[str, Any]) -> torch.Tensor:
    model, loading = AutoModelForCausalLM.from_pretrained(
        request["folder"],
        dtype=torch.float32,
        trust_remote_code=request["remote_code"],
        output_loading_info=True,
    )
    if loading["missing_keys"] or loading["unexpected_keys"]:
        raise ValueError(f"weights and config do not fit together: {loading}")
    tokens = torch.tensor([request["tokens"]], device=request["device"])
    logits: torch.Tensor = model.to(request["device"]).eval()(tokens, use_cache=False).logits[0]
    return logits.cpu().contiguous()


if __name__ == "__main__":
    main()
