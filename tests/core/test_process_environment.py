"""Settings of libraries have good defaults, and a user's own win."""

import os
import subprocess
import sys

import pytest

from unspool.core.process_environment import set_process_environment

CHILD = """
import sys
from unspool.cli import main
assert "torch" not in sys.modules, "too late: libraries read the environment when they are loaded"
sys.argv = ["unspool", "--version"]
try:
    main.main()
except SystemExit:
    pass
import os
print(os.environ["OMP_WAIT_POLICY"])
"""


def test_threads_wait_without_spinning_and_memory_is_pinned_by_several_threads():
    environment: dict[str, str] = {}
    set_process_environment(environment)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert int(environment["GOMP_SPINCOUNT"]) < 10_000, "the default is 300,000 and more"
    assert "pinned_num_register_threads:8" in environment["PYTORCH_CUDA_ALLOC_CONF"]


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_any_setting_of_the_user_about_waiting_wins(name):
    environment = {name: "1", "PYTORCH_ALLOC_CONF": "backend:native"}
    set_process_environment(environment)
    assert environment == {name: "1", "PYTORCH_ALLOC_CONF": "backend:native"}


def test_the_command_sets_them_before_torch_is_loaded():
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run([sys.executable, "-c", CHILD], env=unset, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["PASSIVE"], done.stderr
