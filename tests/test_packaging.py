"""The wheel is small and complete, and works in an environment that has never seen the repository."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import unspool

ROOT = Path(__file__).parents[1]
MOST_BYTES = 25 << 20


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_python_m_unspool_is_the_command():
    done = subprocess.run([sys.executable, "-m", "unspool", "recipes"], capture_output=True, text=True)
    assert done.returncode == 0 and "tiny" in done.stdout, done.stderr


def test_the_dockerfile_copies_what_is_there_and_runs_as_a_user():
    """A linter's rules, since a container tool is not everywhere."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    known = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in lines} <= known and lines[0][0] == "FROM"
    assert re.fullmatch(r"\S+:[\d.]+\S*", lines[0][1]), "a base image with a version"
    for word, rest in lines:
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
        if word == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists" in rest
        if word == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest and "-c constraints.txt" in rest
    users = [rest for word, rest in lines if word == "USER"]
    assert users and users[-1] != "root"
    assert {rest for word, rest in lines if word == "ENTRYPOINT"} == {'["unspool"]'}


def test_the_citation_names_this_version():
    import yaml

    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["version"] == unspool.__version__ and found["cff-version"] == "1.2.0"
    assert all(entry.get("authors") and entry.get("title") for entry in [found, *found["references"]])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, ROOT)
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_is_small_and_holds_what_the_package_reads(wheel):
    assert wheel.stat().st_size < MOST_BYTES
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "unspool"
    wanted = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(package.parent)) for path in wanted} <= names
    assert {"unspool/py.typed", "unspool/__init__.pyi"} <= names and not any("tests/" in name for name in names)
    metadata = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {"eval", "gguf", "track", "cluster"} <= set(re.findall(r"Provides-Extra: (\S+)", metadata))


@pytest.mark.slow
def test_the_wheel_runs_the_demo_and_an_audit_in_an_empty_environment(wheel, tmp_path):
    """The dependencies are those of this environment; of Unspool itself, only the wheel is there."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    options = {"cwd": tmp_path, "env": env}
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", **options).strip())
    # Not the .pth files in it, one of which may lead to the repository.
    import numpy

    (site / "dependencies.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel, **options)

    assert str(site) in run(python, "-c", "import unspool; print(unspool.__file__)", **options)
    assert "tiny" in run(folder / "bin" / "unspool", "recipes", **options)
    told = run(python, "-m", "unspool", "run", "tiny", **options)
    assert (tmp_path / "runs" / "tiny" / "report.html").is_file(), told
    verdict = run(python, "-m", "unspool", "audit", **options)
    assert "documents" in verdict
