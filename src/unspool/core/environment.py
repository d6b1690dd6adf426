"""What a bug report needs: versions, devices, memory, disk, tools and settings, without keys and passwords."""

import importlib.metadata
import locale
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from unspool import __version__
from unspool.core.host_memory import measure_host_memory

# Variables that change what libraries compute, load or print.
_PREFIXES = (
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_", "ROCR_", "HIP_", "OMP_", "MKL_", "SLURM_", "RAY_"),
    *("PYTORCH_", "TORCH", "TRITON_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "OPENAI_", "WANDB_"),
    *("UNSPOOL_", "PYTHON", "LC_"),
)
_NAMES = {
    *("CC", "CXX", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "TMPDIR"),
    *("LANG", "TERM", "COLUMNS", "NO_COLOR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "CI"),
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
}
_SECRET = re.compile(r"KEY|TOKEN(?!IZERS_)|SECRET|PASS|AUTH|CREDENTIAL|COOKIE", re.IGNORECASE)
# Names, passwords and parameters of addresses.
_LOGIN, _PARAMETERS = re.compile(r"//[^/@\s]*@"), re.compile(r"(://[^?\s]*)\?\S*")
HIDDEN = "set, not shown"
_TOOLS = ("cc", "gcc", "g++", "clang", "nvcc", "ninja", "git", "nvidia-smi")
_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*(?:;.*extra == '([\w-]+)')?")


def versions() -> dict[str, str]:
    """Versions of Unspool, Python, torch and transformers, without importing them."""
    packages = {name: package_version(name) or "not installed" for name in ("torch", "transformers")}
    return {"unspool": __version__, "python": platform.python_version(), **packages}


def package_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus() -> list[dict[str, Any]]:
    """Name and memory of each GPU that torch sees; imports torch only if the system has a GPU."""
    if not (any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()):
        return []
    import torch

    found = []
    for at in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(at)
        free, total = torch.cuda.mem_get_info(at)
        found.append(
            {
                "name": facts.name,
                "compute_capability": f"{facts.major}.{facts.minor}",
                "memory_bytes": total,
                "free_bytes": free,
            }
        )
    return found


def diagnose() -> dict[str, Any]:
    """Gather everything; a part that fails is reported with its error, which may be the bug."""
    required, optional = _packages()
    return {
        "versions": versions(),
        "system": {
            "platform": platform.platform(),
            "python": hide_home(sys.executable),
            "unspool": hide_home(str(Path(__file__).parents[1])),
            "encoding": f"{locale.getpreferredencoding(False)}, stdout {getattr(sys.stdout, 'encoding', None)}",
            "cpu": cpu_name(),
            "cpus": os.cpu_count(),
            "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        },
        "memory": _memory(),
        "torch": _attempt(_torch),
        "gpus": _attempt(gpus),
        "tools": {name: _tool_version(name) for name in _TOOLS},
        "packages": required,
        "optional_packages": optional,
        "folders": {name: _folder(path) for name, path in _folders().items()},
        "environment": environment_variables(),
    }


def environment_variables() -> dict[str, str]:
    """Variables that matter and are set; values of keys, tokens and passwords are replaced."""
    # Lower-case names too: proxy variables are often lower-case.
    chosen = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.upper() in _NAMES or name.upper().startswith(_PREFIXES) or name.upper().endswith("_API_KEY")
    }
    return {name: HIDDEN if _SECRET.search(name) else _without_login(value) for name, value in chosen.items()}


def _without_login(value: str) -> str:
    return hide_home(_PARAMETERS.sub(r"\1?…", _LOGIN.sub("//…@", value)))


def hide_home(path: str) -> str:
    """Replace the home folder with ~, because its name is often a person's name."""
    home = str(Path.home())
    return path.replace(home, "~") if len(home) > 1 else path


def _attempt(gather: Any) -> Any:
    try:
        return gather()
    except Exception as error:  # a broken driver or installation can raise any type
        return {"error": f"{type(error).__name__}: {error}"}


def _torch() -> dict[str, Any]:
    import torch

    cudnn: Any = torch.backends.cudnn
    return {
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "cuda_available": torch.cuda.is_available(),
        "cudnn": cudnn.version() if cudnn.is_available() else None,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "distributed": torch.distributed.is_available(),
    }


def _packages() -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Return versions of required packages and of those of the extras; None for a missing package."""
    required: dict[str, str | None] = {}
    optional: dict[str, str | None] = {"vllm": package_version("vllm"), "triton": package_version("triton")}
    for text in importlib.metadata.requires("unspool") or [] if package_version("unspool") else []:
        found = _REQUIREMENT.match(text)
        if found is None or found[2] == "dev":
            continue
        (optional if found[2] else required)[found[1]] = package_version(found[1])
    return required, optional


def _memory() -> dict[str, int | None]:
    found = measure_host_memory()
    names = ("total", "available", "container_limit")
    return {f"{name}_bytes": None if found is None else getattr(found, name) for name in names}


def cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _tool_version(name: str) -> str | None:
    """Return the first line with a digit that a tool prints about itself; None if it is not installed."""
    path = shutil.which(name)
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, errors="replace")
    except (OSError, subprocess.SubprocessError) as error:
        return f"{hide_home(path)}: {type(error).__name__}"
    lines = [line.strip() for line in done.stdout.splitlines() if re.search(r"\d+\.\d+", line)]
    return lines[0] if lines else hide_home(path)


def _folders() -> dict[str, Path]:
    from huggingface_hub import constants

    home = Path.home()
    return {
        "current": Path.cwd(),
        "temporary": Path(tempfile.gettempdir()),
        "Hugging Face models": Path(constants.HF_HUB_CACHE),
        "Hugging Face datasets": Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"),
        "Triton kernels": Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
    }


def _folder(path: Path) -> dict[str, Any]:
    """Check whether a folder exists and is writable; add the free space there or at its nearest parent."""
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    return {
        "path": hide_home(str(path)),
        "exists": path.is_dir(),
        "writable": os.access(nearest, os.W_OK),
        "free_bytes": shutil.disk_usage(nearest).free,
    }
