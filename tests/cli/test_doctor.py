"""`--version` and `unspool doctor` print what a bug report needs, and no secrets."""

import json
import platform
import sys

import pytest
import torch
import transformers
from typer.testing import CliRunner

from unspool import __version__
from unspool.cli.main import build_app
from unspool.core import environment

SECRETS = {
    "OPENAI_API_KEY": "sk-hidden-1",
    "HF_TOKEN": "hf-hidden-2",
    "WANDB_API_KEY": "hidden-3",
    "MISTRAL_API_KEY": "hidden-4",
    "https_proxy": "http://user:hidden-5@proxy:3128",
    "HF_ENDPOINT": "https://mirror/?sig=hidden-6",
    "OPENAI_PASSWORD": "hidden-7",
    "AWS_SECRET_ACCESS_KEY": "hidden-8",
}


def printed(*options: str) -> str:
    done = CliRunner().invoke(build_app(), list(options))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_versions_are_printed_with_the_gpus(monkeypatch):
    monkeypatch.setattr(environment, "gpus", lambda: [{"name": "H9000", "memory_bytes": 80_000_000_000}])

    assert printed("--version").splitlines() == [
        f"unspool {__version__}",
        f"python {platform.python_version()}",
        f"torch {torch.__version__}",
        f"transformers {transformers.__version__}",
        "GPU H9000, 80 GB",
    ]


@pytest.mark.parametrize("options", [["doctor"], ["doctor", "--json"]])
def test_no_key_or_password_is_printed(options, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    text = printed(*options)

    assert "hidden" not in text
    assert "OPENAI_API_KEY" in text and "proxy:3128" in text and "OMP_NUM_THREADS" in text


def test_doctor_names_versions_devices_memory_disk_tools_packages_and_folders(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    found = json.loads(printed("doctor", "--json"))

    assert found["versions"]["torch"] == torch.__version__
    assert found["system"]["python"] == environment.hide_home(sys.executable)
    assert found["torch"]["cuda_available"] is torch.cuda.is_available()
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert set(found["memory"]) == {"total_bytes", "available_bytes", "container_limit_bytes"}
    assert {"cc", "nvcc", "ninja"} <= set(found["tools"])
    assert found["packages"]["numpy"] and {"lm-eval", "gguf", "ray", "wandb", "vllm"} <= set(found["optional_packages"])
    assert found["folders"]["current"]["exists"] and found["folders"]["current"]["free_bytes"] > 0
    assert found["environment"]["TOKENIZERS_PARALLELISM"] == "false"
    lines = printed("doctor").splitlines()
    assert [line.rstrip(":") for line in lines if not line.startswith(" ")] == [key.replace("_", " ") for key in found]


def test_a_broken_torch_is_reported_and_does_not_end_the_report(monkeypatch):
    def broken() -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(environment, "_torch", broken)

    assert "error: OSError: libcudart.so.13: cannot open" in printed("doctor").replace("error  ", "error: ")
