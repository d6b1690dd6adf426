"""The tokenizer that a corpus or rows were made with, found through the run's folder.

In: a place, and a way to turn what a recipe names into a path. Out: a decoder, or a sentence on how to name one.
Promise: of several candidates the one whose hash stands in the manifest is taken; where none matches and one is
used all the same, that is said, because its text may be wrong.
Price: loading a tokenizer imports `transformers` and torch, which takes seconds.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from unspool.base.artefact import read_manifest
from unspool.base.errors import ConfigError, UnspoolError
from unspool.base.progress import say
from unspool.data.knots import ALL_KNOTS, add_knots
from unspool.data.tokens import Encoder, build_encoder
from unspool.inspect.decode import Decoder
from unspool.inspect.place import Place
from unspool.inspect.reading import Reading
from unspool.model.tokenizer import load_tokenizer

Resolve = Callable[[str], str]


def find_tokenizer(place: Place, given: str | None, resolve: Resolve) -> Reading:
    """`given` if there is one (ConfigError if it cannot be loaded), else what the run's folder leads to."""
    wanted = _recorded_hash(place)
    if given is not None:
        tokenizer = load_tokenizer(resolve(given))
        encoder = _encoder(tokenizer)
        return _reading(tokenizer, encoder, given, place, matches=_matches(encoder, wanted))
    fallback: tuple[Any, Encoder | None, str] | None = None
    for name, ref in _candidates(place, resolve):
        try:
            tokenizer = load_tokenizer(ref)
        except UnspoolError:
            continue
        encoder = _encoder(tokenizer)
        if _matches(encoder, wanted):
            return _reading(tokenizer, encoder, name, place, matches=True)
        fallback = fallback or (tokenizer, encoder, name)
    if fallback is not None:
        return _reading(*fallback, place, matches=False)
    return Reading(notes=["No tokenizer was found, so tokens are shown as ids; name one with --tokenizer FOLDER|ID."])


def _reading(tokenizer: Any, encoder: Encoder | None, name: str, place: Place, *, matches: bool) -> Reading:
    tokenizer = copy.deepcopy(tokenizer)
    notes = [] if matches else [f"Tokenizer {name} is not the one recorded in the manifest; the text may be wrong."]
    recorded = place.counts.get("added_tokens") or {}
    knots = add_knots(tokenizer, [knot for knot in ALL_KNOTS if knot in recorded])
    if isinstance(recorded, dict) and any(recorded.get(knot) != number for knot, number in knots.items()):
        notes.append(f"Tokenizer {name} has other knots than these rows, so marks and labels may look like text.")
    bos = encoder.bos[0] if encoder and encoder.bos else None
    eos = encoder.eos if encoder else None
    return Reading(decoder=Decoder(tokenizer, bos=bos, eos=eos), encoder=encoder, name=name, notes=notes)


def _encoder(tokenizer: Any) -> Encoder | None:
    try:
        return build_encoder(tokenizer)
    except ConfigError:  # no EOS: fine for reading
        return None


def _matches(encoder: Encoder | None, wanted: str | None) -> bool:
    return wanted is None or (encoder is not None and encoder.digest == wanted)


def _recorded_hash(place: Place) -> str | None:
    """The hash of the tokenizer; rows that add no tokens do not keep it, but their corpora do."""
    manifests = [place.manifest]
    if place.run_dir is not None:
        manifests += [read_manifest(folder) or {} for folder in sorted(place.run_dir.glob("corpus/*"))]
    for manifest in manifests:
        inputs = manifest.get("inputs")
        found = inputs.get("tokenizer") if isinstance(inputs, dict) else None
        if isinstance(found, str):
            return found
    return None


def _candidates(place: Place, resolve: Resolve) -> Iterator[tuple[str, str]]:
    """What to call a tokenizer and where to load it from. Folders first: a Hub id may have to be downloaded."""
    if place.run_dir is None:
        return
    model = _model_of(place.run_dir / "recipe.yaml")
    ref = None
    if model is not None:
        try:
            ref = resolve(model)
        except UnspoolError:  # an asset that this version does not ship
            model = None
    if model and ref and Path(ref).exists():
        yield model, ref
    for folder in sorted(place.run_dir.glob("stages/*/model")):
        yield str(folder), str(folder)
    if model and ref and not Path(ref).exists():
        say(f"tokenizer {model}: not a folder here, so it is looked for on the Hub")
        yield model, ref


def _model_of(recipe: Path) -> str | None:
    """The model a recipe starts from, or the tokenizer of a new one."""
    try:
        content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    model = content.get("model") if isinstance(content, dict) else None
    named = model.get("tokenizer") if isinstance(model, dict) else model
    return named if isinstance(named, str) else None
