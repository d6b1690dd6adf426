from pathlib import Path

import pytest

from .fake_run import write_fake_run


@pytest.fixture
def fake_run(tmp_path: Path) -> Path:
    return write_fake_run(tmp_path / "tiny")
