"""Wheel and sdist are small and complete, and work in an environment that has never seen the repository."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import unspool

ROOT = Path(__file__).parents[1]
MOST_BYTES = 25 << 20
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


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


def test_the_dockerfile_has_a_python_that_fits_and_copies_what_the_build_reads():
    text = (ROOT / "Dockerfile").read_text()
    (version,) = re.findall(r"^FROM python:(\d+\.\d+)-", text, re.MULTILINE)
    assert Version(version) in SpecifierSet(PYPROJECT["project"]["requires-python"])
    copied = {source for rest in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for source in rest.split()}
    project = PYPROJECT["project"]
    assert {"pyproject.toml", project["readme"], *project["license-files"], "constraints.txt", "src"} <= copied
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not copied & set(ignored)
    (extras,) = re.findall(r"'\.\[([a-z,]+)\]'", text)
    assert {*extras.split(",")} <= {*project["optional-dependencies"]}


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


def empty_environment(tmp_path, package, *options):
    """Install `package` into an environment with the dependencies of this one, and nothing else of Unspool."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    settings = {"cwd": tmp_path, "env": env}
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", **settings).strip())
    # Not the .pth files in it, one of which may lead to the repository.
    import numpy

    (site / "dependencies.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    pip = env | {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_"))}
    run(python, "-m", "pip", "install", "-q", *options, "--no-deps", package, cwd=tmp_path, env=pip)
    assert str(site) in run(python, "-c", "import unspool; print(unspool.__file__)", **settings)
    assert "tiny" in run(folder / "bin" / "unspool", "recipes", **settings)
    return python, site, settings


@pytest.mark.slow
def test_the_wheel_runs_the_demo_and_an_audit_in_an_empty_environment(wheel, tmp_path):
    python, _, settings = empty_environment(tmp_path, wheel, "--no-index")
    told = run(python, "-m", "unspool", "run", "tiny", **settings)
    assert (tmp_path / "runs" / "tiny" / "report.html").is_file(), told
    verdict = run(python, "-m", "unspool", "audit", **settings)
    assert "documents" in verdict


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", *PYPROJECT["build-system"]["requires"])
    run(python, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (found,) = folder.glob("*.tar.gz")
    return found


@pytest.mark.slow
def test_the_sdist_is_small_and_is_the_repository(sdist):
    """So that the tests and benchmarks run from it too."""
    assert sdist.stat().st_size < MOST_BYTES
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"PKG-INFO", "LICENSE", "Makefile", "Dockerfile", "tests/test_packaging.py"} <= names
    if (ROOT / ".git").exists():
        tracked = set(run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0"))
        assert names - {"PKG-INFO"} == tracked - {""}


@pytest.mark.slow
def test_the_sdist_installs_what_the_wheel_installs(sdist, wheel, tmp_path):
    _, site, _ = empty_environment(tmp_path, sdist)
    installed = {path.relative_to(site).as_posix() for path in (site / "unspool").rglob("*") if path.is_file()}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("unspool/")}
    assert {name for name in installed if "__pycache__" not in name} == in_wheel
