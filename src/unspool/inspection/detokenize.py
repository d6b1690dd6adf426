"""Convert tokens to text exactly: every byte of every token, even where a character was split.

The texts of consecutive runs of tokens join to the text of all tokens. A character whose tokens are in two runs belongs
to the first run; invalid bytes show as U+FFFD. Control tokens are spelled out and unknown ids shown as numbers, while a
tokenizer's own `decode` drops them or cleans up spaces. Covers byte-level tokenizers (GPT-2, Llama 3, Qwen) and those
with byte fallback (Llama 2, Mistral, Gemma).
"""

import copy
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError, UnspoolError
from unspool.data.strategies.utk.special_tokens import ALL_KNOTS, add_knots
from unspool.data.tokenize.encoder import Encoder, build_encoder
from unspool.inspection.run_paths import DataPath
from unspool.models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONGEST_CHARACTER = 4  # bytes in UTF-8


class Decoder:
    """Exact decoding with a `transformers` fast tokenizer."""

    def __init__(self, tokenizer: Any, *, bos: int | None, eos: int | None) -> None:
        self._backend = tokenizer.backend_tokenizer
        self.special = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items()}
        self.bos = bos  # None if documents begin without BOS
        self.eos = eos
        self._bytes: dict[int, bytes] = {}

    def id_of(self, name: str) -> int | None:
        """Return the id of a control token."""
        return next((id_ for id_, other in self.special.items() if other == name), None)

    def bytes_of(self, token: int) -> bytes:
        if token not in self._bytes:
            self._bytes[token] = self._spell(token)
        return self._bytes[token]

    def text(self, tokens: np.ndarray) -> str:
        return b"".join(map(self.bytes_of, tokens.tolist())).decode("utf-8", "replace")

    def texts(self, runs: Sequence[np.ndarray]) -> list[str]:
        """Return the text of each of several consecutive runs of tokens."""
        spelled = [b"".join(map(self.bytes_of, run.tolist())) for run in runs]
        for index in range(len(spelled)):
            missing = _missing_bytes(spelled[index])
            for later in range(index + 1, len(spelled)):
                taken = _continuation(spelled[later], missing)
                spelled[index] += spelled[later][:taken]
                spelled[later] = spelled[later][taken:]
                missing -= taken
                if not missing or spelled[later]:
                    break
        return [part.decode("utf-8", "replace") for part in spelled]

    def next_border(self, tokens: np.ndarray, at: int) -> int:
        """Return the first position from `at` on that is not inside a character."""
        for border in range(at, min(at + _LONGEST_CHARACTER, len(tokens))):
            if not _continuation(self.bytes_of(int(tokens[border])), 1):
                return border
        return at

    def _spell(self, token: int) -> bytes:
        if token in self.special:
            return self.special[token].encode()
        name = self._backend.id_to_token(token)
        if name is None:
            return f"⟨id {token}⟩".encode()
        if self._byte_level:
            # Characters outside the alphabet belong to added tokens, which are stored as plain text.
            return b"".join(bytes([_BYTES[char]]) if char in _BYTES else char.encode() for char in name)
        if found := _FALLBACK.fullmatch(name):
            return bytes([int(found[1], 16)])
        return str(name).replace("▁", " ").encode()

    @cached_property
    def _byte_level(self) -> bool:
        decoder = self._backend.decoder
        described = json.loads(decoder.__getstate__()) if decoder is not None else {}
        kinds = [described, *described.get("decoders", [])]
        return any(kind.get("type") == "ByteLevel" for kind in kinds)


def _byte_alphabet() -> dict[str, int]:
    """Map the characters of byte-level vocabularies to bytes; printable bytes are their own characters."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _continuation(data: bytes, most: int) -> int:
    """Count the leading bytes, up to `most`, that continue a character."""
    count = 0
    while count < min(most, len(data)) and 0x80 <= data[count] < 0xC0:
        count += 1
    return count


def _missing_bytes(data: bytes) -> int:
    """Count the bytes that the last character still needs."""
    for back in range(1, min(_LONGEST_CHARACTER, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC2:
            wanted = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4 if byte < 0xF5 else 0
            return max(0, wanted - back)
        if byte < 0x80:
            return 0
    return 0


@dataclass(frozen=True, kw_only=True)
class FoundTokenizer:
    """A tokenizer with notes to show; without a `decoder`, tokens are shown as numbers."""

    decoder: Decoder | None = None
    encoder: Encoder | None = None  # for text without tokens
    name: str | None = None
    notes: list[str] = field(default_factory=list)


Resolve = Callable[[str], str]


def find_tokenizer(place: DataPath, given: Any, resolve: Resolve) -> FoundTokenizer:
    """Load `given`, a tokenizer or its name (ConfigError if that fails); by default, that of the run's folder."""
    wanted = _recorded_hash(place)
    if given is not None:
        name = given if isinstance(given, str) else given.name_or_path
        tokenizer = load_tokenizer(resolve(given)) if isinstance(given, str) else given
        encoder = _encoder(tokenizer)
        return _found(tokenizer, encoder, name, place, matches=_matches(encoder, wanted))
    fallback: tuple[Any, Encoder | None, str] | None = None
    for name, ref in _candidates(place, resolve):
        try:
            tokenizer = load_tokenizer(ref)
        except UnspoolError:
            continue
        encoder = _encoder(tokenizer)
        if _matches(encoder, wanted):
            return _found(tokenizer, encoder, name, place, matches=True)
        fallback = fallback or (tokenizer, encoder, name)
    if fallback is not None:
        return _found(*fallback, place, matches=False)
    note = "No tokenizer was found, so tokens are shown as ids; give a tokenizer (a folder or Hub id)."
    return FoundTokenizer(notes=[note])


def _found(tokenizer: Any, encoder: Encoder | None, name: str, place: DataPath, *, matches: bool) -> FoundTokenizer:
    tokenizer = copy.deepcopy(tokenizer)
    notes = [] if matches else [f"Tokenizer {name} differs from the one in the manifest; the text may be wrong."]
    recorded = place.counts.get("added_tokens") or {}
    knots = add_knots(tokenizer, [knot for knot in ALL_KNOTS if knot in recorded])
    if isinstance(recorded, dict) and any(recorded.get(knot) != number for knot, number in knots.items()):
        notes.append(f"Tokenizer {name} has other special tokens than this dataset, so they may be shown as text.")
    bos = encoder.bos[0] if encoder and encoder.bos else None
    eos = encoder.eos if encoder else None
    return FoundTokenizer(decoder=Decoder(tokenizer, bos=bos, eos=eos), encoder=encoder, name=name, notes=notes)


def _encoder(tokenizer: Any) -> Encoder | None:
    try:
        return build_encoder(tokenizer)
    except ConfigError:  # no EOS: not needed for reading
        return None


def _matches(encoder: Encoder | None, wanted: str | None) -> bool:
    return wanted is None or (encoder is not None and encoder.digest == wanted)


def _recorded_hash(place: DataPath) -> str | None:
    """Read the tokenizer's hash; datasets without added tokens do not record it, but their corpora do."""
    manifests = [place.manifest]
    if place.run_dir is not None:
        manifests += [read_manifest(folder) or {} for folder in sorted(place.run_dir.glob("corpus/*"))]
    for manifest in manifests:
        inputs = manifest.get("inputs")
        found = inputs.get("tokenizer") if isinstance(inputs, dict) else None
        if isinstance(found, str):
            return found
    return None


def _candidates(place: DataPath, resolve: Resolve) -> Iterator[tuple[str, str]]:
    """Yield names of tokenizers and where to load them from. Folders come first: a Hub id may need a download."""
    if place.run_dir is None:
        return
    model = _model_of(place.run_dir / "recipe.yaml")
    ref = None
    if model is not None:
        try:
            ref = resolve(model)
        except UnspoolError:  # an asset that this version does not include
            model = None
    if model and ref and Path(ref).exists():
        yield model, ref
    for folder in sorted(place.run_dir.glob("stages/*/model")):
        yield str(folder), str(folder)
    if model and ref and not Path(ref).exists():
        logger.info(f"tokenizer {model}: not a local folder; searching the Hub")
        yield model, ref


def _model_of(recipe: Path) -> str | None:
    """Return the model that a recipe starts from, or the tokenizer of a new one."""
    try:
        content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    model = content.get("model") if isinstance(content, dict) else None
    named = model.get("tokenizer") if isinstance(model, dict) else model
    return named if isinstance(named, str) else None
