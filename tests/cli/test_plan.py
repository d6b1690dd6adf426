"""`unspool plan`: what a person and a program see of it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from factory import save_mini
from unspool.cli.main import build_app
from unspool.core.host_memory import measure_host_memory
from unspool.planning.calibration import Calibration, save_calibration
from unspool.planning.recipe_inputs import planned_model
from unspool.recipe.load import load_recipe


def run(*options: object):
    return CliRunner().invoke(build_app(), ["plan", *map(str, options)])


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("unspool.planning.local_machine.gpus", list)


@pytest.fixture
def mini(tmp_path) -> Path:
    path = save_mini(tmp_path)
    path.write_text(path.read_text().replace("name: mini\n", f"name: mini\nout: {tmp_path / 'run'}\n"))
    return path


def test_a_person_sees_data_memory_time_and_settings():
    done = run("smollm2-32k", "--gpu", "h200", "--price", 2.5)
    assert done.exit_code == 0, done.output
    for text in (
        "120 steps",
        "books-32k",
        "epochs",
        "FLOP per token",
        "positions",
        "GiB",
        "tokens/s",
        "GPU hours",
        "2.5",
    ):
        assert text in done.stdout, text
    assert "measured on one NVIDIA H200" in done.stdout
    assert "estimated" in run("smollm2-32k", "--gpu", "h100").stdout


def test_a_doomed_run_is_refused_and_its_line_can_be_pasted():
    done = run("prolong-512k", "--gpu", "h100", "--count", 8)
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    refusal = next(line for line in done.stderr.splitlines() if "fits with" in line)
    words = shlex.split(refusal.split("fits with ", 1)[1])
    again = run("prolong-512k", "--gpu", "h100", "--count", 8, *words)
    assert again.exit_code == 0, again.output
    assert "ulysses 8" in again.stdout
    # The paper's hours, and what explains the difference.
    paper, *why = again.stdout[again.stdout.index("paper      ") :].splitlines()[:4]
    assert paper == "paper      12,200 H100 hours for 20B tokens (ProLong, Table 9): 489 tokens/s per GPU, MFU 8%"
    assert why[0].split(" per GPU: ")[1].startswith("the same work at MFU ") and why[0].endswith("instead of 8%")
    assert why[1].strip() == "if each row had cost the paper as much as one document of that length: MFU 23%"
    assert "(§B.3)" in why[2]


def test_json_is_whole_and_pure(mini):
    done = run(mini, "--gpu", "h200", "--json", "--price", 3)
    plan = json.loads(done.stdout)
    assert done.exit_code == 0
    assert set(plan) == {
        *(
            "recipe",
            "fits",
            "machine",
            "origin_words",
            "model",
            "sources",
            "stages",
            "warnings",
            "hours",
            "gpu_hours",
            "cost",
        )
    }
    assert set(plan["stages"][0]) >= {
        *(
            "name",
            "context_length",
            "steps",
            "tokens",
            "rows",
            "flops_per_token",
            "flops",
            "fits",
            "problem",
            "written",
        ),
        *("chosen", "faster", "ways", "rope", "lengths_counted", "document_len"),
    }
    assert set(plan["stages"][0]["chosen"]) >= {"layout", "memory", "seconds", "set", "settings", "hours", "cost"}
    assert plan["fits"] is True


def test_json_of_what_does_not_fit_tells_the_ways_out():
    done = run("prolong-512k", "--gpu", "4090", "--json")
    assert done.exit_code == 2
    (stage,) = json.loads(done.stdout)["stages"]
    assert stage["problem"]
    assert stage["chosen"] is None
    assert {way["kind"] for way in stage["ways"]} >= {"gpus"}
    assert stage["reported"]["gpu_hours"] == 12200
    assert stage["reported"]["tokens_per_second"] == pytest.approx(20 * 2**30 / 12200 / 3600)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["tiny", "--gpu", "h999"], "--gpu 'h999' is not known"),
        (["tiny", "--gpu", "h200", "--host-mem", "much"], "--host-mem 'much' is not a size"),
        (
            ["tiny", "--measure"],
            "there is none; add --gpu this to measure on this CPU.",
        ),
        (["nothing"], "neither a file nor a bundled recipe"),
        (["tiny", "--gpu", "h200", "--set", "stages.0.lr=no"], "stages.0.lr"),
        (["tiny", "--gpu", "h200", "--model", "./nowhere"], "not found, so its shape is unknown"),
    ],
)
def test_mistakes_are_told_in_a_sentence(options, told):
    done = run(*options)
    assert done.exit_code == 2
    assert told in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize("options", [["nothing"], ["tiny", "--gpu", "h999"], ["tiny", "--set", "stages.0.lr=no"]])
def test_mistakes_are_told_before_torch_is_imported(options):
    code = "import sys; from unspool.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "plan", *options], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr


def test_without_a_gpu_it_says_what_it_plans_for():
    done = run("tiny")
    assert done.exit_code == 0
    assert "NVIDIA H200" in done.stdout


def test_a_measurement_in_the_runs_folder_is_used_and_said(mini, tmp_path):
    before = json.loads(run(mini, "--gpu", "h200", "--json").stdout)
    assert not (tmp_path / "run").exists(), "planning writes nothing"
    shape = planned_model(load_recipe(mini)).shape
    measured = Calibration(
        device="NVIDIA H200", gpu="h200", versions="torch", shape=shape, tokens=128, document_len=128, layers=1.0,
        rest=3.0, activations=1.5, seconds=(1.0, 2.0), num_layers=(2, 4),
    )  # fmt: skip
    save_calibration(measured, tmp_path / "run")
    done = run(mini, "--gpu", "h200", "--json")
    after = json.loads(done.stdout)
    assert "measured: " in after["machine"]["rates"]
    one, other = (plan["stages"][0]["chosen"] for plan in (before, after))
    assert other["seconds"]["loss"] == pytest.approx(3 * one["seconds"]["loss"])
    assert other["memory"]["parts"]["kept"] == pytest.approx(1.5 * one["memory"]["parts"]["kept"])
    elsewhere = json.loads(run(mini, "--gpu", "h100", "--json").stdout)
    assert "estimated" in elsewhere["machine"]["rates"]


@pytest.mark.parametrize("name", ["cpu", "this"])
def test_a_plan_for_this_machine_s_cpu_says_its_rates_memory_and_time(mini, name):
    done = run(mini, "--gpu", name, "--json")

    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["machine"]["gpu"] == "cpu"
    assert "GFLOP/s" in found["machine"]["rates"]
    # The machine's own memory, not a GPU's.
    assert found["machine"]["gib"] == pytest.approx(measure_host_memory().total / 2**30)
    parts = found["stages"][0]["chosen"]["memory"]["parts"]
    parameters = found["model"]["parameters"]
    # In fp32, weights are their own masters.
    assert (parts["weights"], parts["optimizer"]) == (4 * parameters, 8 * parameters)
    assert found["hours"] > 0
    for wrong in (("--count", 2), ("--host-mem", "64G")):
        refused = run(mini, "--gpu", name, *wrong)
        assert refused.exit_code == 2
        assert refused.stderr.startswith(f"error: --gpu {name} plans for")


def test_a_gpu_in_this_machine_is_found_by_its_name(mini, monkeypatch):
    def seen(name: str) -> None:
        facts = {"name": name, "memory_bytes": 79 << 30}
        monkeypatch.setattr("unspool.planning.local_machine.gpus", lambda: [facts])

    seen("NVIDIA H100 80GB HBM3")
    assert json.loads(run(mini, "--gpu", "this", "--json").stdout)["machine"]["gpu"] == "h100"
    seen("NVIDIA Unheard-of 9")
    done = run(mini, "--gpu", "this")
    assert done.exit_code == 2
    assert done.stderr == ("error: the local GPU, NVIDIA Unheard-of 9, is not known; pass a similar GPU with --gpu.\n")


def test_links_are_given_in_gigabytes_per_second():
    done = run("prolong-64k", "--gpu", "h200", "--count", 8, "--link", 100, "--network", 5, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["machine"]["links"]["inside_gb_per_s"] == 100
    refused = run("prolong-64k", "--gpu", "h200", "--count", 8, "--link", 0)
    assert refused.exit_code == 2
    assert "--link" in refused.output and "Traceback" not in refused.output


def test_an_infinite_bandwidth_is_refused():
    done = run("smollm2-32k", "--gpu", "h200", "--count", 8, "--link", "inf")
    assert done.exit_code == 2 and "Invalid value for '--link'" in done.output
