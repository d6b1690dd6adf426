"""The advice in words, shared by the terminal and the page."""

from unspool.base.sizes import format_size
from unspool.position.advice import Advice, MethodAdvice, short

_LEVELS = "▁▂▃▄▅▆▇█"
_NEGATIVE = "×"


def model_facts(advice: Advice) -> list[tuple[str, str]]:
    rope = advice.rope
    heads = f"{rope.num_kv_heads} KV heads" if rope.num_kv_heads > 1 else "a single KV head"
    turned = f"{rope.rotary_dim} dimensions of each head turn"
    if rope.rotary_dim != advice.head_dim:
        turned += f", of {advice.head_dim}"
    scaling = advice.parameters["rope_type"]
    own = f"base {short(rope.base)}" + ("" if scaling == "default" else f", scaled: {scaling}")
    if advice.head_bases:
        own = "a base per head (HARPE)"
    facts = [("rotary shape", f"{turned}, {heads}"), ("positions now", own)]
    made = f"{format_size(rope.original_len)} tokens"
    if rope.max_positions != rope.original_len:
        made += f", claims {format_size(rope.max_positions)}"
    facts.append(("made for", made))
    if advice.local_layers:
        facts.append(("sliding layers", "keep positions of their own; what follows is about the other layers"))
    return facts


def verdict(advice: Advice) -> list[tuple[str, str]]:
    """The two rules of thumb for one base."""
    target = format_size(advice.context_len)
    if advice.bound is None:
        men = "no base up to 1e16 passes"
    else:
        passing = f"the smallest base of two digits with B(m) ≥ 0 at every distance below {target}"
        men = f"{short(advice.bound)}, {passing}; good models have been trained on both sides of it"
    factor = advice.context_len / advice.rope.original_len
    ntk = f"{short(advice.ntk_base)}, for {factor:g} times the length (ProLong trained with twice what it gives)"
    return [("bound of Men et al.", men), ("NTK rule", ntk)]


def reach_text(each: MethodAdvice, advice: Advice) -> str:
    worst, best = (_distance(reach, advice) for reach in each.reach)
    return worst if worst == best else f"{worst} to {best}"


def _distance(reach: int, advice: Advice) -> str:
    return f"over {format_size(advice.looked_until)}" if reach >= advice.looked_until else f"{reach:,}"


def sparkline(each: MethodAdvice, width: int) -> str:
    """The lowest B(m) by distance, on a logarithmic scale; × where it is negative."""
    parts = [
        each.curve[len(each.curve) * number // width : len(each.curve) * (number + 1) // width]
        for number in range(min(width, len(each.curve)))
    ]
    lowest = [min(part) for part in parts]
    return "".join(_NEGATIVE if low < 0 else _LEVELS[min(7, int(8 * low))] for low in lowest)
