"""A script that computes logits of a model folder with plain `transformers`, without importing Unspool.

It reads one line of JSON per request: folder, whether the folder's code may run, device, a text or null, passes of
tokens with positions, and `out`. It writes the safetensors file `out` with the tokens of the text and the logits of
each pass's last tokens. Then it prints a line of JSON: {"error": null or text}.
"""

import json
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    # Libraries and the folder's code may print; keep their output separate from the replies.
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        error = None
        try:
            found = answers(request)
            refuse_unspool()
            save_file(found, request["out"])
        except Exception as problem:  # every error is sent as a reply
            error = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
        print(json.dumps({"error": error}), file=replies, flush=True)


def refuse_unspool() -> None:
    loaded = [name for name in sys.modules if name.split(".")[0] == "unspool"]
    if loaded:
        raise RuntimeError(f"{loaded[0]} is loaded, so this is not plain transformers")


def answers(request: dict[str, Any]) -> dict[str, Tensor]:
    folder, remote = request["folder"], request["remote_code"]
    found = {}
    if request["text"] is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote)
        found["text"] = torch.tensor(tokenizer(request["text"])["input_ids"])
    config = AutoConfig.from_pretrained(folder, trust_remote_code=remote)
    # Some versions use SDPA by default, which ignores the soft cap of attention scores.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    for dtype in dict.fromkeys(one["dtype"] for one in request["passes"]):
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=remote,
            output_loading_info=True,
            attn_implementation="eager" if capped else None,
        )
        if loading["missing_keys"] or loading["unexpected_keys"]:
            raise ValueError(f"weights and config do not fit together: {loading}")
        model = model.to(request["device"]).eval()
        found |= {one["name"]: _logits(model, one).float().cpu() for one in request["passes"] if one["dtype"] == dtype}
    return found


@torch.inference_mode()
def _logits(model: Any, one: dict[str, Any]) -> Tensor:
    """Return the logits of the last `keep` tokens; with `cached`, from a second call with a cache of earlier tokens."""
    ids, positions = (torch.tensor([one[name]], device=model.device) for name in ("ids", "positions"))
    # Without a mask, `transformers` would treat gaps in positions as boundaries of packed documents.
    mask = torch.ones_like(ids)
    seen = len(one["ids"]) - one["keep"] if one["cached"] else 0
    cache = None
    if seen:
        before = model(
            input_ids=ids[:, :seen], position_ids=positions[:, :seen], attention_mask=mask[:, :seen], use_cache=True
        )
        cache = before.past_key_values
    out = model(input_ids=ids[:, seen:], position_ids=positions[:, seen:], attention_mask=mask, past_key_values=cache)
    logits: Tensor = out.logits[0, -one["keep"] :]
    return logits.contiguous()


if __name__ == "__main__":
    main()
