"""Write tests/training/golden_loss.json: the losses of a tiny model trained from scratch on a CPU.

    OMP_NUM_THREADS=1 .venv/bin/python tools/golden_loss.py

A test repeats the training and compares. Run this only after a change that should change the loss. Give both values in
the commit: the script prints the old and the new last loss.
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from training.golden import GOLDEN, train_golden  # noqa: E402


def main() -> None:
    before = json.loads(GOLDEN.read_text())["losses"][-1] if GOLDEN.is_file() else None
    with tempfile.TemporaryDirectory() as folder:
        losses = train_golden(Path(folder))
    GOLDEN.write_text(json.dumps({"renew": "tools/golden_loss.py", "losses": losses}, indent=0) + "\n")
    print(f"{GOLDEN.relative_to(ROOT)}: {len(losses)} losses, last {losses[-1]:.6f}, before {before}")


if __name__ == "__main__":
    main()
