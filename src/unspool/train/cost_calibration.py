"""What a short measured run says about the cost model: factors for one GPU and one model's shape, in a small file.

Apart from cost_measure.py, which makes it: planning with a file that is there needs no torch.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from unspool.base.artefact import write_atomic
from unspool.train.cost import Shape
from unspool.train.cost_time import Pace

FILE = "calibration.json"
# Beyond these a measurement is of something else: another program on the GPU, or too short a run.
LEAST, MOST = 0.5, 3.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    device: str  # as its driver calls it
    gpu: str  # as `--gpu` does
    versions: str
    shape: Shape
    tokens: int  # of a micro-batch that was measured
    document_len: int
    layers: float  # measured seconds ÷ computed ones
    rest: float
    activations: float  # likewise of bytes
    seconds: tuple[float, float]  # of a step with the fewer and with the more layers
    num_layers: tuple[int, int]

    @property
    def told(self) -> str:
        few, many = self.num_layers
        return (
            f"{few} and {many} layers, {self.tokens} tokens on {self.device} ({self.versions}); layers take "
            f"{self.layers:.2f}, the rest {self.rest:.2f} and activations {self.activations:.2f} times what is computed"
        )

    def correct(self, pace: Pace) -> Pace:
        return replace(pace, layers=self.layers, rest=self.rest)

    def is_for(self, gpu: str, shape: Shape) -> bool:
        return (self.gpu, self.shape) == (gpu, shape)


def bounded(factor: float) -> float:
    return min(MOST, max(LEAST, factor))


def save_calibration(found: Calibration, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    write_atomic(path, json.dumps(asdict(found), indent=1) + "\n")
    return path


def load_calibration(folder: Path) -> Calibration | None:
    """None where there is none, or one that cannot be read: it is only a help."""
    try:
        content = json.loads((folder / FILE).read_text())
        pairs = {name: tuple(content[name]) for name in ("seconds", "num_layers")}
        return Calibration(**content | pairs | {"shape": Shape(**content["shape"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
