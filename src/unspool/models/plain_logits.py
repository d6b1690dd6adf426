"""Logits of a model folder as plain `transformers` computes them. Run as a program, in a process of its own.

In, a line of JSON each: folder, whether its code may run, device, a text or none, passes of tokens at positions, and
`out`. Out: the safetensors file `out` with the tokens of the text, and for each pass the logits of its last tokens; and
a line of JSON: {"error": null or text}.
Promise: nothing of Unspool is loaded; what this computes, any user of the folder computes.
"""

import json
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    # What a library or a folder's code prints must not stand among the answers.
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        error = None
        try:
            found = answers(request)
            refuse_ours()
            save_file(found, request["out"])
        except Exception as problem:  # whatever it is, it is the answer to the question asked
            error = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
        print(json.dumps({"error": error}), file=replies, flush=True)


def refuse_ours() -> None:
    loaded = [name for name in sys.modules if name.split(".")[0] == "unspool"]
    if loaded:
        raise RuntimeError(f"not a plain process: {loaded[0]} is loaded")


def answers(request: dict[str, Any]) -> dict[str, Tensor]:
    folder, remote = request["folder"], request["remote_code"]
    found = {}
    if request["text"] is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote)
        found["text"] = torch.tensor(tokenizer(request["text"])["input_ids"])
    config = AutoConfig.from_pretrained(folder, trust_remote_code=remote)
    # Some versions choose SDPA by themselves, which leaves the cap of attention's scores out without a word.
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
    """Logits of the last `keep` tokens; with `cached`, these come in a second call that finds the others in a cache."""
    ids, positions = (torch.tensor([one[name]], device=model.device) for name in ("ids", "positions"))
    # Without a mask, gaps in the positions would be taken for borders of packed documents.
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
