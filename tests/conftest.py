"""What holds for every test: one thread, so that sums come out the same each time, examples that are the same each
time, however slow the machine is, and `gpu` marks that skip."""

import functools
import gc
import os
import sysconfig

import pytest
from hypothesis import HealthCheck, settings

from unspool.core.logging import set_up_logging

# Before torch is imported: one core is shared by whatever else runs, and a fork must not meet a pool of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Asking the driver whether there is a device would spoil it for every process forked later.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# The log of each task of a corpus asks for all of them three times, which takes as long as a small task.
sysconfig.get_path = functools.cache(sysconfig.get_path)

# Neither time nor chance decides: an example that takes long on a busy machine is no failure, and one that nobody has
# met before would fail a change that has nothing to do with it. `--hypothesis-profile default` looks for new ones.
settings.register_profile(
    "unspool", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unspool")


@pytest.fixture(autouse=True)
def _log_lines_on_stderr() -> None:
    """As on the command line, so that tests can read log lines."""
    set_up_logging()


@pytest.fixture(autouse=True, scope="module")
def _garbage_of_this_file_only() -> None:
    """The package collects garbage after each corpus and each model. Imported modules and collected tests are a million
    objects and none is garbage: without this, looking through them takes half the time of tests/studies."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", help="of tests/chaos: run only this shard of events, such as 1/5")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chaos_shard" in metafunc.fixturenames:
        number, _, count = (metafunc.config.getoption("--shard") or "/5").partition("/")
        metafunc.parametrize("chaos_shard", [int(number)] if number else range(1, int(count) + 1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
