"""Run as a program, in a process of its own: what a user of plain `transformers` gets from exported folders.

In: names of folders, each with `asked.pt` in it. Out: `told.pt` beside it; a line of JSON: what the process has loaded.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def tell(folder: Path) -> dict[str, object]:
    asked = torch.load(folder / "asked.pt")
    ids, start = asked["ids"], asked["start"]
    told: dict[str, object] = {}
    try:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        told["refusal"] = str(error)
    for attention in ("sdpa", "eager"):
        if attention in asked["without"]:
            continue
        model = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype=torch.float32, attn_implementation=attention
        ).eval()
        told[attention] = model(ids).logits
        told[f"{attention} far"] = model(ids, position_ids=asked["far"], attention_mask=torch.ones_like(ids)).logits
        greedy = {"max_new_tokens": asked["new"], "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        told[f"{attention} generated"] = model.generate(ids[:, :start], **greedy)[0, start:].tolist()
        padding = torch.zeros(1, 5, dtype=torch.int64)
        both = torch.cat([torch.cat([padding, ids[:, :start]], dim=1), ids[:, : start + 5]])
        seen = torch.ones_like(both)
        seen[0, :5] = 0
        padded = model.generate(both, attention_mask=seen, **greedy)[0, start + 5 :]
        told[f"{attention} generated after padding"] = padded.tolist()
    told["class"] = [one.__name__ for one in type(model).__mro__]
    told["static"] = model.generate(ids[:, :start], cache_implementation="static", disable_compile=True, **greedy)[
        0, start:
    ].tolist()
    model.save_pretrained(folder / "again")
    again = AutoModelForCausalLM.from_pretrained(folder / "again", trust_remote_code=True, dtype=torch.float32).eval()
    told["saved again"] = again(ids).logits
    return told


if __name__ == "__main__":
    for name in sys.argv[1:]:
        torch.save(tell(Path(name)), Path(name) / "told.pt")
    print(json.dumps([name for name in sys.modules if name.split(".")[0] == "unspool"]))
