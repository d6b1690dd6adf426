"""Two hosts of two ranks each, as network namespaces: they meet, one vanishes, and a slow link only slows them.

Needs root and `ip netns`. A host has its own name, address and link; the folder is shared, as by NFS.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .rank_jobs import assert_same, last_step, launch, overrides, wait_until
from .test_launch_killed import SECONDS, rank_process
from .test_launch_killed import recipe as recipe

RANKS, STEPS = 4, 16
# After the last heartbeat of a host, until all ranks have ended.
NOTICED = 60
NETWORK = "10.213.71"
ETC = Path("/etc/netns")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


def why_not() -> str | None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    name = f"try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return None


@dataclass
class Host:
    name: str
    address: str
    jobs: list["subprocess.Popen[str]"] = field(default_factory=list)

    def command(self, *words: str) -> list[str]:
        """Run a command under this host's name and in its network."""
        return [
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0"; exec "$@"',
            self.name,
            *words,
        ]

    def start(self, line: str) -> "subprocess.Popen[str]":
        job = subprocess.Popen(
            self.command("env", *shlex.split(line)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.jobs.append(job)
        return job

    def ranks(self, out: Path) -> list[int]:
        """The ranks of a job that run in this network."""
        own = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True).stdout
        return [rank for rank in range(RANKS) if str(rank_process(rank, out)) in own.split()]

    def link(self, *words: str) -> None:
        ip("netns", "exec", self.name, *words)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = [Host(f"{letter}-{os.getpid()}", f"{NETWORK}.{number}") for number, letter in enumerate("ab", 1)]
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in made)
    known = ETC.exists()
    try:
        for host in made:
            ip("netns", "add", host.name)
            # `ip netns exec` shows this as /etc/hosts.
            (ETC / host.name).mkdir(parents=True)
            (ETC / host.name / "hosts").write_text(names)
        ip("link", "add", "eth0", "netns", made[0].name, "type", "veth", "peer", "name", "eth0", "netns", made[1].name)
        for host in made:
            for words in (("addr", "add", f"{host.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                host.link("ip", *words)
            host.link("ip", "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            for job in host.jobs:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
                    job.wait()
            subprocess.run(["ip", "netns", "delete", host.name], check=False)
            shutil.rmtree(ETC / host.name, ignore_errors=True)
        if not known and ETC.exists():
            ETC.rmdir()


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only its exit code is left, which a hanging torchrun has not read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def lines_for(recipe: Path, out: Path, hosts: list[Host]) -> list[str]:
    """What `unspool launch` prints for each host."""
    command = [sys.executable, "-m", "unspool.cli.main", "launch", str(recipe), "--verb=train", "--json"]
    places = [f"--nodes={len(hosts)}", f"--gpus={RANKS // len(hosts)}", f"--host={hosts[0].name}", "--restarts=0"]
    done = subprocess.run(
        [*command, *places, *overrides(out, RANKS, STEPS)], capture_output=True, text=True, check=True
    )
    lines: list[str] = json.loads(done.stdout)["lines"]
    return lines


def start(recipe: Path, out: Path, hosts: list[Host]) -> "list[subprocess.Popen[str]]":
    return [host.start(line) for host, line in zip(hosts, lines_for(recipe, out, hosts), strict=True)]


def ends(jobs: "list[subprocess.Popen[str]]", seconds: float) -> list[tuple[int, str]]:
    until = time.monotonic() + seconds
    said = [job.communicate(timeout=max(1, until - time.monotonic()))[1] for job in jobs]
    return [(job.returncode, text) for job, text in zip(jobs, said, strict=True)]


@pytest.mark.slow
def test_a_host_that_vanishes_is_named_and_the_job_resumes(recipe: Path, tmp_path: Path, hosts: list[Host]):
    whole, out = tmp_path / "whole", tmp_path / "out"
    launch(recipe, whole, f"--gpus={RANKS}", ranks=RANKS, steps=STEPS)

    jobs = start(recipe, out, hosts)

    def reaches_step() -> bool:
        assert [job.poll() for job in jobs] == [None, None], [job.stderr and job.stderr.read() for job in jobs]
        return last_step(out) >= 6

    wait_until(reaches_step, "step 6")
    gone = {rank: rank_process(rank, out) for rank in hosts[1].ranks(out)}
    assert len(gone) == RANKS // 2
    hosts[1].link("ip", "link", "set", "eth0", "down")  # nothing arrives, and nobody is told
    began = time.monotonic()
    ((code, said),) = ends(jobs[:1], NOTICED)
    print(f"the other host ended after {time.monotonic() - began:.0f} s:", said, sep="\n")
    assert code != 0
    named = re.findall(r"rank (\d) died at step \d+", said)
    assert sorted(map(int, named)) == sorted(gone), said
    # The ranks that were cut off end as well; torchrun beside them may wait for longer.
    wait_until(lambda: all(map(has_ended, gone.values())), "their end", seconds=NOTICED)
    os.killpg(jobs[1].pid, signal.SIGKILL)
    _, cut_off = jobs[1].communicate()
    print(f"cut off, ended after {time.monotonic() - began:.0f} s:", cut_off, sep="\n")
    assert "no answer from the rendezvous store" in cut_off or "died at step" in cut_off, cut_off

    hosts[1].link("ip", "link", "set", "eth0", "up")
    for code, text in ends(start(recipe, out, hosts), SECONDS):
        assert code == 0, text
    assert_same(out, whole, STEPS)


@pytest.mark.slow
def test_a_slow_link_only_slows(recipe: Path, tmp_path: Path, hosts: list[Host]):
    whole, out = tmp_path / "whole", tmp_path / "out"
    launch(recipe, whole, f"--gpus={RANKS}", ranks=RANKS, steps=STEPS)
    delay = ("netem", "delay", "20ms")
    # Not every kernel has netem; a narrow link does as well.
    narrow = ("tbf", "rate", "100mbit", "burst", "128kb", "latency", "200ms")
    for host in hosts:
        found = [
            subprocess.run(
                ["ip", "netns", "exec", host.name, "tc", "qdisc", "add", "dev", "eth0", "root", *words],
                capture_output=True,
                check=False,
            ).returncode
            for words in (delay, narrow)
        ]
        if 0 not in found:
            pytest.skip("the kernel can neither delay nor narrow a link")
    for code, text in ends(start(recipe, out, hosts), SECONDS):
        assert code == 0, text
        assert "hangs" not in text
    assert_same(out, whole, STEPS)
