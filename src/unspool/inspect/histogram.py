"""Document lengths as inline SVG: per doubling of the length, the share of documents and of tokens."""

from markupsafe import Markup, escape

from unspool.base.sizes import format_size
from unspool.data.lengths import Histogram

# In viewBox units: about a phone's width, so that text stays readable there.
WIDTH, HEIGHT = 420, 190
LEFT, TOP, BOTTOM = 40, 12, 40
_MOST_LABELS = 9


def length_chart(lengths: Histogram) -> Markup:
    """Two bars per bin; the page's style sheet gives their colours."""
    documents, tokens = sum(lengths["documents"]), sum(lengths["tokens"])
    count = len(lengths["at_least"])
    if not documents or not tokens:
        return Markup("")
    bins = [
        (edge, num_docs, num_tokens, num_docs / documents, num_tokens / tokens)
        for edge, num_docs, num_tokens in zip(
            *(lengths[key] for key in ("at_least", "documents", "tokens")), strict=True
        )
    ]
    top = max(max(of_docs, of_tokens) for *_, of_docs, of_tokens in bins)
    floor, wide = HEIGHT - BOTTOM, (WIDTH - LEFT) / count
    every = -(-count // _MOST_LABELS)
    drawn = [_grid(share, top, floor) for share in _ticks(top)]
    for place, (edge, num_docs, num_tokens, of_docs, of_tokens) in enumerate(bins):
        left, bar = LEFT + wide * place, min(wide * 0.42, 34)
        middle = left + wide / 2
        about = f"{format_size(edge)} to {format_size(2 * edge)} tokens: {num_docs:,} documents, {num_tokens:,} tokens"
        for share, name, x in ((of_docs, "of-docs", middle - bar), (of_tokens, "of-tokens", middle)):
            high = (floor - TOP) * share / top
            drawn.append(
                Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"></rect>').format(
                    name, x, floor - high, bar, high
                )
            )
        drawn.append(
            Markup('<rect class="hit" x="{:.1f}" y="{}" width="{:.1f}" height="{}"><title>{}</title></rect>').format(
                left, TOP, wide, floor - TOP, about
            )
        )
        if place % every == 0:
            drawn.append(_text(middle, floor + 16, format_size(edge), "middle"))
    drawn.append(_text((LEFT + WIDTH) / 2, HEIGHT - 6, "tokens, at least", "middle"))
    label = f"Lengths of {documents:,} documents, {escape(format_size(lengths['at_least'][0]))} tokens and more"
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, label, Markup("").join(drawn)
    )


def _ticks(top: float) -> list[float]:
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5) if top / step <= 5)
    return [step * number for number in range(int(top / step + 1e-9) + 1)]


def _grid(share: float, top: float, floor: float) -> Markup:
    y = floor - (floor - TOP) * share / top
    line = Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"></line>').format(LEFT, WIDTH, y, y)
    return line + _text(LEFT - 6, y + 4, f"{100 * share:.0f}%", "end")


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)
