"""Maps as pictures: PNG with a palette, as a `data:` address that needs no file and no network.

In: float32[C, C] of probabilities or of their differences. Out: PNG.
Promise: colours follow the logarithm, so that weak attention far back is seen beside strong attention nearby; what
lies after the query, where nothing can be seen, is transparent. A difference is blue or red by its sign, and grey
where it is too small for the scale.
Price: values below the scale's lowest share its darkest colour.
"""

import base64
import struct
import zlib
from dataclasses import dataclass

import numpy as np

# Entry 0 of a palette is transparent; the others are the scale.
_STEPS = 255


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Colours by the logarithm of a value, from `lowest` to 1."""

    decades: int
    colours: tuple[str, ...]
    signed: bool = False  # then the middle colour is that of 0, and what is nearer to it than `lowest`

    @property
    def lowest(self) -> float:
        return float(10.0**-self.decades)

    def places(self, values: np.ndarray) -> np.ndarray:
        """From 0 to 1 along the colours."""
        sizes = np.log10(np.maximum(np.abs(values), self.lowest) / self.lowest) / self.decades
        found: np.ndarray = np.clip(sizes, 0, 1)
        return (found * np.sign(values) + 1) / 2 if self.signed else found

    def ticks(self) -> list[tuple[float, str]]:
        """Places from 0 to 1, and what stands there."""
        shares = [(at / self.decades, f"{100 * self.lowest * 10**at:g}%") for at in range(self.decades + 1)]
        if not self.signed:
            return shares
        ups = [((place + 1) / 2, name) for place, name in shares[self.decades % 2 or 2 :: 2]]
        downs = [(1 - place, f"−{name}") for place, name in reversed(ups)]
        return [*downs, (0.5, "0"), *((place, f"+{name}") for place, name in ups)]


# Dark to bright, also for eyes that do not tell red from green.
MAP = Scale(decades=5, colours=("#0d1233", "#3a2d78", "#7c3a8c", "#c14d7a", "#f0785a", "#fbb65f", "#fdf3b4"))
DIFFERENCE = Scale(
    decades=4,
    colours=("#08306b", "#2171b5", "#7fb3dc", "#e8e8ea", "#f2a184", "#cb2f2a", "#67000d"),
    signed=True,
)


def map_png(values: np.ndarray, scale: Scale) -> bytes:
    """A square map; what lies above the diagonal is transparent."""
    indices = (1 + np.rint(scale.places(values) * (_STEPS - 1))).astype(np.uint8)
    indices[np.triu_indices(len(indices), 1)] = 0
    return _png(indices, _palette(scale.colours))


def scale_png(scale: Scale) -> bytes:
    """The colours of a scale from its lowest to its highest, one point high."""
    return _png(np.arange(1, _STEPS + 1, dtype=np.uint8)[None], _palette(scale.colours))


def data_address(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _palette(anchors: tuple[str, ...]) -> bytes:
    rgb = np.array([[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in anchors])
    places, steps = np.linspace(0, 1, len(anchors)), np.linspace(0, 1, _STEPS)
    mixed = np.stack([np.interp(steps, places, channel) for channel in rgb.T], axis=1)
    entries: bytes = np.rint(mixed).astype(np.uint8).tobytes()
    return bytes(3) + entries


def _png(indices: np.ndarray, palette: bytes) -> bytes:
    height, width = indices.shape
    lines = np.pad(indices, ((0, 0), (1, 0)))  # each line begins with its filter, none
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette), (b"tRNS", b"\0"), (b"IDAT", zlib.compress(lines.tobytes(), 9)))
    body = b"".join(_chunk(name, content) for name, content in (*chunks, (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + body


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
