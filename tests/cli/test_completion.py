"""Shells complete commands and options after `--install-completion`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unspool


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Run a script in a shell with an own home folder and `unspool` on the path."""
    home = tmp_path_factory.mktemp("home")
    command = home / "bin" / "unspool"
    command.parent.mkdir()
    source = Path(unspool.__file__).parents[1]
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{source}" exec "{sys.executable}" -m unspool.cli.main "$@"\n')
    command.chmod(0o755)
    env = {"HOME": str(home), "PATH": f"{command.parent}:/usr/bin:/bin", "LANG": "C.UTF-8", "TERM": "dumb"}

    def run(name: str, script: str) -> str:
        path = shutil.which(name)
        if path is None:
            pytest.skip(f"{name} is not installed")
        done = subprocess.run([path, "-c", script], env=env, cwd=home, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_bash_completes_commands_and_options_after_the_installation(shell):
    # `true` keeps bash alive, which is recognized as the parent process.
    assert "bash completion installed" in shell("bash", "unspool --install-completion; true")
    assert "complete -o default -F _unspool_completion unspool" in shell("bash", "unspool --show-completion; true")

    script = """
        source ~/.bashrc
        complete -p unspool
        try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _unspool_completion unspool; echo "${COMPREPLY[*]}"; }
        try unspool gen
        try unspool generate MODEL --prom
    """
    registered, command, option = shell("bash", script).splitlines()

    assert registered == "complete -o default -F _unspool_completion unspool"
    assert (command, option) == ("generate", "--prompt-file")


def test_zsh_completes_commands_after_the_installation(shell):
    assert "zsh completion installed" in shell("zsh", "unspool --install-completion; true")

    script = """
        grep -q zfunc ~/.zshrc || exit 1
        compdef() { print -r -- "compdef $@" }
        _arguments() { print -r -- "$@" }
        source ~/.zfunc/_unspool
        words=(unspool gen) CURRENT=2
        _unspool_completion
        words=(unspool generate MODEL --prom) CURRENT=4
        _unspool_completion
    """
    found = shell("zsh", script)

    assert "compdef _unspool_completion unspool" in found
    assert '"generate":"Ask a model about a long text' in found
    assert '"--prompt-file":' in found
