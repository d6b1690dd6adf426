"""`unspool.advise_rope`: RoPE settings for a longer context, before any training."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from unspool.core.errors import ConfigError
from unspool.core.progress import progress_bar
from unspool.core.result import Result
from unspool.core.sizes import format_size, parse_size
from unspool.models.config import config_values
from unspool.models.location import model_path
from unspool.rope.advice import (
    PUBLISHED,
    Advice,
    advise,
    model_facts,
    reach_text,
    render_advice,
    sparkline,
    verdict,
)
from unspool.rope.methods import ROPE_METHODS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SPARK = 18  # characters of a curve in the terminal


@dataclass(frozen=True, kw_only=True)
class RopeAdvice(Result):
    """Settings of every RoPE method for one model and context length, as `advise_rope` returns them.

    Example:
        >>> import unspool
        >>> advice = unspool.advise_rope("asset:tiny-base", "2K")
        >>> print(advice["abf"].line)
        rope: {method: abf, base: 2.1e5}
    """

    model: str
    advice: Advice

    def __getitem__(self, method: str) -> Any:
        """The settings of one method: `line` for a recipe, `parameters` for a config, `reach`, `lowest`."""
        return next(each for each in self.advice.methods if each.method == method)

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, **asdict(self.advice), "published": [asdict(each) for each in PUBLISHED]}

    def renderers(self) -> Mapping[str, Callable[[], str]]:
        return {"html": lambda: render_advice(self.advice, self.model)}

    def print(self, console: Console) -> None:
        advice = self.advice
        console.print(f"{self.model} at {format_size(advice.context_len)}", style="bold", soft_wrap=True)
        facts = [*model_facts(advice), *verdict(advice)]
        width = max(len(name) for name, _ in facts)
        for name, text in facts:
            console.print(f"{name.ljust(width)}  {text}", soft_wrap=True)
        console.print()
        console.print(self._methods())
        console.print("lowest B(m) relative to B(0), by distance on a log scale, × where negative", style="dim")
        console.print("\nTo paste into a stage:", style="bold")
        for each in advice.methods[1:]:
            console.print(f"  {each.line}", soft_wrap=True)
        for name, method in ROPE_METHODS.items():
            if method.requirement is not None:
                console.print(f"  {name} needs {method.requirement}", soft_wrap=True)
        console.print("\nWhat published recipes used:", style="bold")
        width = max(len(used.model) for used in PUBLISHED)
        for used in PUBLISHED:
            line = f"  {used.model.ljust(width)}  {used.lengths}: {used.positions} ({used.source})"
            console.print(line, soft_wrap=True)

    def _methods(self) -> Table:
        advice = self.advice
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("method", "settings", "B(m) ≥ 0 up to", "lowest", f"1 … {format_size(advice.context_len)}"):
            # In a narrow window, wrap the columns that read well on two lines.
            table.add_column(column, no_wrap=column not in ("settings", "B(m) ≥ 0 up to"))
        for each in advice.methods:
            style = "" if each.reach[0] >= advice.context_len else "yellow"
            cells = (each.summary, reach_text(each, advice), f"{100 * each.lowest:.1f}%", sparkline(each, _SPARK))
            table.add_row(each.method, *cells, style=style)
        return table


def advise_rope(model: "str | Path | PreTrainedModel", context_length: int | str) -> RopeAdvice:
    """Advise on RoPE settings for a longer context: bounds, settings of every method, published recipes.

    Only the model's config is read, and nothing is trained. B(m) is how much higher a similar key scores than a random
    one at distance m (Men et al.). Each method is shown with the distance up to which B(m) is not negative.

    Args:
        model: A model folder, a `.gguf` file, a Hub id, `asset:tiny-base`, or a model of `transformers`.
        context_length: Context length to extend to in tokens, such as `"128K"` (131,072) or 131072.

    Returns:
        The advice: print it, `save` it as a page, take `to_dict()`, or one method such as `advice["abf"]`.

    Raises:
        ConfigError: The model has no RoPE, or was trained for this length already.

    Example:
        >>> import unspool
        >>> advice = unspool.advise_rope("asset:tiny-base", context_length="2K")
        >>> advice["abf"].parameters["rope_theta"]
        210000.0
    """
    try:
        length = parse_size(context_length)
    except ValueError as error:
        raise ConfigError(f"`context_length={context_length!r}`: {error}.") from None
    if isinstance(model, str | Path):
        name, values = str(model), config_values(model_path(str(model), Path()))
    else:
        name, values = model.name_or_path, model.config.to_dict()
    with progress_bar("RoPE bases tried", None) as advance:
        return RopeAdvice(model=name, advice=advise(values, length, advance=lambda done: advance(done)))
