"""AdamW's moments by name, for checkpoints and for the stage that comes next.

In and out: tensors named `<parameter>/exp_avg`, `/exp_avg_sq` (in 8 bits `….codes` and `….scales`) and `/step`.
Promise: read back into a parameter of the same shape and kind they are the same bits.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unspool.train.adam8 import Quantized
from unspool.train.adamw import Moment, Trained

FIRST, SECOND = "exp_avg", "exp_avg_sq"


def moment_tensors(one: Trained) -> dict[str, Tensor]:
    found = {f"{one.name}/step": torch.tensor(float(one.count))}
    for name, moment in ((FIRST, one.first), (SECOND, one.second)):
        if isinstance(moment, Quantized):
            found |= {f"{one.name}/{name}.codes": moment.codes, f"{one.name}/{name}.scales": moment.scales}
        else:
            found[f"{one.name}/{name}"] = moment
    return found


@torch.no_grad()
def load_moment(one: Trained, saved: Mapping[str, Tensor]) -> None:
    """Also of the other kind, and where rows have been added to an embedding since: these start at zero.

    Moments of a whole parameter go to the part of it that this rank keeps.
    """
    if f"{one.name}/step" not in saved:
        return
    one.set_count(int(saved[f"{one.name}/step"]))
    for name, moment in ((FIRST, one.first), (SECOND, one.second)):
        _load(moment, f"{one.name}/{name}", saved, rows=one.rows or slice(None))


def _load(moment: Moment, key: str, saved: Mapping[str, Tensor], *, rows: slice) -> None:
    codes = saved.get(f"{key}.codes")
    if codes is None:
        value = saved[key]
    elif isinstance(moment, Quantized) and moment.codes.shape == codes.shape:
        # As they are: quantising what was read from them could move a scale by a rounding.
        moment.codes.copy_(codes)
        moment.scales.copy_(saved[f"{key}.scales"])
        return
    else:
        value = Quantized(codes, saved[f"{key}.scales"], signed=key.endswith(f"/{FIRST}")).read()
    target = moment.codes if isinstance(moment, Quantized) else moment
    value = value.to_local() if isinstance(value, DTensor) else value[rows]
    found = torch.zeros(target.shape, device=target.device)
    found[: len(value)] = value.to(target.device)
    if isinstance(moment, Quantized):
        moment.write(found)
    else:
        moment.copy_(found)
