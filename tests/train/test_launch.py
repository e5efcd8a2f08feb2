"""The commands are compared with the references of gcloud and xpk; stand-ins on PATH record what they are given."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dsv32_jax.errors import WorkFailedError
from train import launch

ROOT = Path(__file__).parents[2]
TPUS = ("gcloud", "compute", "tpus")
# The flags that each command's reference page lists (cloud.google.com/sdk/gcloud/reference; xpk 1.16's parsers), of
# those that we could ever need; a flag of another command, such as --version for --runtime-version, is not among them.
EVERYWHERE = {"--project", "--zone", "--quiet", "--format"}
DOCUMENTED = {
    (*TPUS, "tpu-vm", "create"): {"--accelerator-type", "--version", "--spot", "--reserved"},
    (*TPUS, "tpu-vm", "scp"): {"--worker", "--recurse"},
    (*TPUS, "tpu-vm", "ssh"): {"--worker", "--command"},
    (*TPUS, "tpu-vm", "delete"): {"--async"},
    (*TPUS, "queued-resources", "create"): {
        "--accelerator-type", "--runtime-version", "--node-id", "--node-count", "--node-prefix", "--spot",
        "--reserved", "--guaranteed", "--valid-until-duration",
    },
    (*TPUS, "queued-resources", "describe"): set(),
    (*TPUS, "queued-resources", "scp"): {"--worker", "--node", "--batch-size", "--recurse"},
    (*TPUS, "queued-resources", "ssh"): {"--worker", "--node", "--batch-size", "--command"},
    (*TPUS, "queued-resources", "delete"): {"--async", "--force"},
    ("xpk", "cluster", "create"): {
        "--cluster", "--tpu-type", "--num-slices", "--spot", "--on-demand", "--reservation"
    },
    ("xpk", "cluster", "delete"): {"--cluster", "--force"},
    ("xpk", "workload", "create"): {
        "--cluster", "--workload", "--tpu-type", "--num-slices", "--docker-image", "--command", "--max-restarts",
        "--termination-grace-period-seconds",
    },
    ("xpk", "workload", "delete"): {"--cluster", "--workload", "--force"},
}  # fmt: skip
AWKWARD = 'data.sources=gs://b/it\'s "$HOME" `x` \\ ;&|*.jsonl'  # what a shell would take apart
ALL_STEPS = {
    "tpu-vm": "create,install,doctor,run,delete",
    "queued": "create,wait,install,doctor,run,delete",
    "xpk": "cluster,delete-run,run,delete-cluster",
}


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "dist" / "dsv32_jax-0.1.0-py3-none-any.whl"
    path.parent.mkdir()
    path.touch()
    return path


@pytest.fixture
def arguments(wheel):
    """Return a function that makes a whole command line of a recipe, with changes."""

    def make(recipe, *extra, **changes):
        options = {
            "project": "p", "zone": "us-east5-a", "accelerator-type": "v5p-128", "config": "sparse",
            "workdir": "gs://bucket/runs/a b",
        }  # fmt: skip
        if recipe == "xpk":
            options["image"] = "gcr.io/p/i:1"
        else:
            options |= {"runtime-version": "v2-alpha-tpuv5", "wheel": str(wheel)}
        options |= {name.replace("_", "-"): value for name, value in changes.items()}
        named = [f"--{name}={value}" for name, value in options.items()]
        return [recipe, "pod", *named, *extra]

    return make


@pytest.fixture
def printed(arguments, capsys):
    """Return a function that gives the lines that --dry-run prints."""

    def lines(recipe, *extra, **changes):
        assert launch.main([*arguments(recipe, *extra, **changes), "--dry-run"]) == 0
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Put a gcloud and an xpk on PATH; return a function that gives the argument lists they were called with."""
    folder, log = tmp_path / "bin", tmp_path / "calls.jsonl"
    folder.mkdir()
    for tool in ("gcloud", "xpk"):
        (folder / tool).write_text(
            f"""#!{sys.executable}
import json, os, sys
calls = open({str(log)!r}, "a+")
calls.seek(0)
earlier = len(calls.readlines())
calls.write(json.dumps(["{tool}", *sys.argv[1:]]) + "\\n")
if "describe" in sys.argv:
    states = os.environ.get("STATES", "ACTIVE").split()
    print(states[min(earlier, len(states) - 1)])
sys.exit(3 if os.environ.get("FAILING", "none") in sys.argv else 0)
"""
        )
        (folder / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: (
        [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    )


def test_a_tpu_vm_is_made_filled_checked_and_used(printed, wheel):
    lines = printed("tpu-vm", "--spot", "--steps", ALL_STEPS["tpu-vm"], "dense.steps=5")
    where = "--project=p --zone=us-east5-a"
    gcloud = "gcloud compute tpus tpu-vm"
    assert lines[0] == (
        f"{gcloud} create pod {where} --accelerator-type=v5p-128 --version=v2-alpha-tpuv5 --spot"
    )
    assert lines[1] == f"{gcloud} scp {wheel} pod: {where} --worker=all"
    assert lines[2].startswith(f"{gcloud} ssh pod {where} --worker=all '--command=python3 -m pip")
    doctor, run = (shlex.split(line)[-1] for line in lines[3:5])
    assert doctor == (
        "--command=exec dsv32/bin/python -m train.doctor --storage 'gs://bucket/runs/a b'"
    )
    assert run == (
        "--command=exec dsv32/bin/python -m train.pretrain --config sparse --workdir 'gs://bucket/runs/a b'"
        " dense.steps=5 distributed=true"
    )
    assert lines[5] == f"{gcloud} delete pod {where} --quiet"


@pytest.mark.parametrize(
    ("slices", "nodes"),
    [(1, ["--node-id=pod"]), (4, ["--node-count=4", "--node-prefix=pod"])],
)
def test_slices_of_a_queued_resource_are_its_nodes(printed, slices, nodes):
    create, wait, *others = printed(
        "queued", "--steps", ALL_STEPS["queued"], f"mesh.dcn_data={slices}", slices=slices
    )
    named = [flag for flag in shlex.split(create) if flag.startswith("--node")]
    assert named == nodes
    describe = "gcloud compute tpus queued-resources describe pod --project=p --zone=us-east5-a"
    assert f"""state="$({describe} '--format=value(state.state)')\"""" in wait
    assert all("--worker=all --node=all" in line for line in others[:-1])
    assert "--force" in shlex.split(others[-1])  # else it has to be emptied of its nodes first


def test_a_workload_runs_in_the_image_on_every_slice(printed):
    cluster, run = printed("xpk", "mesh.dcn_data=2", slices=2)
    assert cluster == (
        "xpk cluster create --cluster=pod --project=p --zone=us-east5-a --tpu-type=v5p-128 --num-slices=2 --on-demand"
    )
    assert {"--workload=pod-run", "--num-slices=2", "--docker-image=gcr.io/p/i:1"} < {
        *shlex.split(run)
    }
    assert shlex.split(run)[-1].startswith(
        "--command=exec python -m train.pretrain --config sparse "
    )


@pytest.mark.parametrize("recipe", launch.RECIPES)
def test_only_flags_that_the_references_list_are_given(printed, recipe):
    paid = "--reservation=r" if recipe == "xpk" else "--reserved"
    for line in printed(recipe, paid, "--steps", ALL_STEPS[recipe]):
        words = shlex.split(line.removeprefix('while state="$(').split(')" || exit;')[0])
        command = next(known for known in DOCUMENTED if words[: len(known)] == list(known))
        flags = {word.split("=")[0] for word in words if word.startswith("--")}
        assert flags <= DOCUMENTED[command] | EVERYWHERE, line
        assert {"--project", "--zone"} <= flags


@pytest.mark.parametrize("recipe", launch.RECIPES)
def test_the_printed_script_and_the_command_itself_call_the_same(arguments, printed, fakes, recipe):
    steps = ("--steps", ALL_STEPS[recipe])
    script = "\n".join(printed(recipe, *steps, AWKWARD, slices=1))
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    subprocess.run(["bash", "-e"], input=script, text=True, check=True)
    from_script = fakes()
    assert launch.main(arguments(recipe, *steps, AWKWARD, slices=1)) == 0
    assert fakes() == from_script * 2
    run = next(call for call in from_script if "train.pretrain" in call[-1])
    # What the shell of a host makes of it: the override is one word again, to the letter.
    remote = shlex.split(run[-1].removeprefix("--command="))
    assert AWKWARD in remote
    assert "gs://bucket/runs/a b" in remote


def test_the_host_shell_passes_the_words_on(printed, tmp_path):
    """The run's command, in a shell as ssh starts it, with a python that prints its arguments."""
    run = shlex.split(printed("tpu-vm", "--steps", "run", AWKWARD)[0])[-1].removeprefix(
        "--command="
    )
    python = tmp_path / launch.VENV / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", run], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    words = ["-m", "train.pretrain", "--config", "sparse", "--workdir", "gs://bucket/runs/a b"]
    assert json.loads(done.stdout) == [*words, AWKWARD, "distributed=true"]


def test_nothing_runs_in_a_dry_run(printed, fakes):
    printed("queued")
    assert fakes() == []


def test_a_command_that_fails_ends_the_recipe(arguments, fakes, monkeypatch, capsys):
    monkeypatch.setenv("FAILING", "scp")
    assert launch.main(arguments("tpu-vm")) == 1
    assert [call[4] for call in fakes()] == ["create", "scp"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "error: step install: `gcloud compute tpus tpu-vm scp ...` ended with exit code 3"
    )


def test_a_queued_resource_is_waited_for(fakes, monkeypatch):
    monkeypatch.setenv("STATES", "WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
    step = launch.Step("wait", ["gcloud", "describe"], until="ACTIVE")
    launch.run_step(step, poll_s=0.01)
    assert len(fakes()) == 3


def test_a_queued_resource_that_is_lost_is_not_waited_for(fakes, monkeypatch):
    monkeypatch.setenv("STATES", "PROVISIONING SUSPENDED")
    step = launch.Step("wait", ["gcloud", "describe"], until="ACTIVE")
    with pytest.raises(WorkFailedError, match="step wait: the state is SUSPENDED, not ACTIVE"):
        launch.run_step(step, poll_s=0.01)


@pytest.mark.parametrize(
    ("states", "status", "looks"),
    [("WAITING_FOR_RESOURCES PROVISIONING ACTIVE", 0, 3)]
    + [(f"PROVISIONING {lost}", 1, 2) for lost in launch.LOST_STATES],
)
def test_the_printed_wait_ends_where_the_command_itself_does(
    printed, fakes, tmp_path, monkeypatch, states, status, looks
):
    script = "\n".join([*printed("queued", "--steps", "wait"), "touch next-step"])
    (tmp_path / "bin" / "sleep").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "sleep").chmod(0o755)
    monkeypatch.setenv("STATES", states)
    for strict in ([], ["-e"]):
        done = subprocess.run(
            ["bash", *strict], input=script, cwd=tmp_path, text=True, capture_output=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == status
        lost = states.split()[-1]
        message = "" if status == 0 else f"step wait: the state is {lost}, not ACTIVE\n"
        assert done.stderr == message
        assert len(fakes()) == looks
        assert (tmp_path / "next-step").exists() == (status == 0)
        (tmp_path / "calls.jsonl").unlink()


def test_a_printed_wait_whose_command_fails_ends_with_its_status(printed, fakes, monkeypatch):
    monkeypatch.setenv("FAILING", "describe")
    (wait,) = printed("queued", "--steps", "wait")
    assert subprocess.run(["bash", "-c", wait], timeout=60, check=False).returncode == 3
    assert len(fakes()) == 1


def test_gke_starts_again_what_was_preempted_and_nothing_else(printed):
    (run,) = printed("xpk", "--steps", "run")
    words = shlex.split(run)
    assert "--max-restarts=100" in words
    # xpk 1.16 starts a workload again after 42 and 127 to 255 (src/xpk/commands/workload.py, get_restart_exit_codes).
    assert shlex.split(words[-1].removeprefix("--command="))[-1] == "--restart-status=42"


@pytest.mark.parametrize(("recipe", "tool"), [("queued", "gcloud"), ("xpk", "xpk")])
def test_a_missing_tool_is_one_line(arguments, monkeypatch, capsys, tmp_path, recipe, tool):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.main(arguments(recipe)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tool} is not on PATH; it comes with ")


@pytest.mark.parametrize(
    ("recipe", "changes", "extra", "message"),
    [
        ("queued", {"slices": 0}, [], "--slices=0 must be at least 1"),
        ("tpu-vm", {"slices": 2}, [], "--slices=2 must be 1: only queued"),
        ("queued", {"config": "spars"}, [], "--config spars: the hosts have the wheel's"),
        ("queued", {"workdir": "runs/a"}, [], "--workdir runs/a must be gs://BUCKET/"),
        ("queued", {"wheel": "no.whl"}, [], "--wheel no.whl: no such wheel; `pip wheel"),
        ("queued", {}, ["--steps", "create,start"], "step 'start' must be one of create, wait,"),
        ("queued", {}, ["--spot", "--reserved"], "not allowed with argument"),
        ("xpk", {}, ["--wheel", "x.whl"], "unrecognized arguments: --wheel"),
        ("queued", {}, ["dense.step=5"], "dense.steps"),
        ("queued", {}, ["dense.steps=0"], "steps=0"),
        ("queued", {"project": ""}, [], "--project '' must be lower-case"),
        ("queued", {"zone": "a; b"}, [], "--zone 'a; b' must be lower-case"),
        ("queued", {"accelerator-type": "v5p 8"}, [], "--accelerator-type 'v5p 8' must be lower-case"),
        ("queued", {"runtime-version": "$V"}, [], "--runtime-version '$V' must be lower-case"),
        ("queued", {"workdir": "gs://"}, [], "--workdir gs:// must be gs://BUCKET/"),
        ("queued", {"workdir": "/"}, [], "--workdir / must be gs://BUCKET/"),
        ("xpk", {"image": ""}, [], "--image '' must be the name"),
        ("xpk", {"grace-seconds": -5}, [], "--grace-seconds=-5 must be at least 1"),
        ("queued", {"slices": 2}, [], "do not make the 2 slices: 1 must equal it"),
        ("queued", {"slices": 2}, ["mesh.dcn_data=4"], "do not make the 2 slices: 4 must equal it"),
        ("queued", {"accelerator-type": "v5p-64"}, ["mesh.ici_expert=3"],
         "do not make the 32 devices: 3 must divide it"),
        ("xpk", {"accelerator-type": "v6e-8", "config": "v32_671b_sparse"}, [],
         "do not make the 8 devices: 16 must divide it"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_before_anything_is_made(
    arguments, fakes, capsys, recipe, changes, extra, message
):
    assert launch.main(arguments(recipe, *extra, **changes)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert fakes() == []


@pytest.mark.parametrize("name", ["mesh.dcn_data=2", "Pod", "a pod", "pod'; echo", "", "pod-"])
def test_a_name_that_google_cloud_would_refuse_is_refused_before(arguments, capsys, name):
    recipe, _, *options = arguments("queued")
    assert launch.main([recipe, name, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: name {name!r} must be lower-case letters")


NEEDED = "--project, --zone, --accelerator-type, --config, --workdir"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the recipe comes first, one of tpu-vm, queued, xpk;"),
        ("queud pod", "the recipe comes first, one of tpu-vm, queued, xpk, not queud;"),
        ("pod queued", "the recipe comes first, one of tpu-vm, queued, xpk, not pod;"),
        ("--dry-run queued pod", "one of tpu-vm, queued, xpk, not --dry-run;"),
        ("--project p queued pod", "one of tpu-vm, queued, xpk, not --project;"),
        ("queued pod", f"are required: {NEEDED}, --runtime-version, --wheel;"),
        ("xpk pod --image i", f"are required: {NEEDED};"),
        ("queued pod --projct p", "unrecognized arguments: --projct; did you mean --project?"),
        ("queued pod --projct=p --x", "--projct=p --x; did you mean --project?"),
        ("queued pod --image i", "unrecognized arguments: --image;"),
        ("queued pod --project", "argument --project: expected one argument"),
    ],
)
def test_what_is_missing_or_mistyped_is_named(capsys, words, message):
    assert launch.main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_missing_name_is_named_alone(arguments, capsys):
    recipe, _, *options = arguments("queued")
    assert launch.main([recipe, *options]) == 2
    assert "are required: name;" in capsys.readouterr().err


def test_the_help_names_the_recipes(capsys):
    assert launch.main(["--help"]) == 0
    assert all(f"\n  {recipe} " in capsys.readouterr().out for recipe in ["tpu-vm"])
    assert launch.main(["xpk", "--help"]) == 0
    assert "--image" in capsys.readouterr().out
