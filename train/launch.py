"""Command: create TPUs on Google Cloud, start a run on every host of them, and delete them again.

Each recipe is a list of steps, each step one command of gcloud or xpk; `--dry-run` prints them as a shell script. A
preempted run starts again on GKE; a queued resource that was preempted has to be deleted and made again.

Nothing here was run against Google Cloud: the commands follow the references of gcloud (2026) and xpk 1.16.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dsv32_jax import command_line, sharding
from dsv32_jax.errors import UsageError, WorkFailedError
from train import config_file, overrides

NAME = "python -m train.launch"
TPU_VM, QUEUED, XPK = "tpu-vm", "queued", "xpk"
SUMMARIES = {
    TPU_VM: "One slice of a Cloud TPU, created at once. Steps: create, install, doctor, run, delete.",
    QUEUED: "Slices of a Cloud TPU, waited for in the queue. Steps: create, wait, install, doctor, run, delete.",
    XPK: "A workload on GKE by xpk. Steps: cluster, delete-run, run, delete-cluster.",
}
SUMMARY = "\n".join(
    [
        "Start a run on TPUs of Google Cloud. --dry-run prints every command and runs none.",
        "",
        *(f"  {recipe:7} {summary}" for recipe, summary in SUMMARIES.items()),
        "",
        f"See `{NAME} {QUEUED} --help`.",
    ]
)
OPTIONS = (
    "--project my-project --zone us-east5-a --accelerator-type v5p-1024 --config v32_671b_sparse"
)
ON_HOSTS = "--runtime-version v2-alpha-tpuv5 --wheel dist/dsv32_jax-0.1.0-py3-none-any.whl"
RUN = "--workdir gs://bucket/runs/a init_from=gs://bucket/v32"
EXAMPLES = {
    TPU_VM: f"""
{NAME} {TPU_VM} pod {OPTIONS} {ON_HOSTS} {RUN} --dry-run
{NAME} {TPU_VM} pod {OPTIONS} {ON_HOSTS} {RUN} --steps delete
""",
    QUEUED: f"""
{NAME} {QUEUED} pod {OPTIONS} {ON_HOSTS} --slices 2 --spot {RUN} mesh.dcn_data=2
{NAME} {QUEUED} pod {OPTIONS} {ON_HOSTS} --slices 2 --spot {RUN} mesh.dcn_data=2 --steps run
""",
    XPK: f"""
{NAME} {XPK} pod {OPTIONS} --image gcr.io/my-project/dsv32:1 --slices 2 {RUN} mesh.dcn_data=2 --dry-run
{NAME} {XPK} pod {OPTIONS} --image gcr.io/my-project/dsv32:1 --slices 2 {RUN} mesh.dcn_data=2 --steps delete-run,run
""",
}
DEFAULT_STEPS = {
    TPU_VM: ("create", "install", "doctor", "run"),
    QUEUED: ("create", "wait", "install", "doctor", "run"),
    XPK: ("cluster", "run"),
}
TOOLS = {"gcloud": "the Google Cloud CLI, cloud.google.com/sdk", "xpk": "pip install xpk"}
VENV = "dsv32"  # beside the wheel, in the home folder of every host
POLL_S = 30
MAX_RESTARTS = 100
XPK_RESTARTS = 42  # what xpk 1.16 starts again, besides 127 to 255; 0 would be the end, any other status a failure
NAMES = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # of what is made on Google Cloud
WORDS = re.compile(r"[a-z0-9][a-z0-9.:_-]*")  # of what is there: projects, zones, types, versions
# Devices, as JAX counts them, of a unit of an accelerator type: v5p counts cores, two a device.
TYPE_DEVICES = {"v5litepod": 1.0, "v5p": 0.5, "v6e": 1.0}
# States of a queued resource from which it does not become ACTIVE any more.
LOST_STATES = ("FAILED", "SUSPENDING", "SUSPENDED", "DELETING")


class Step(NamedTuple):
    """One command of a recipe.

    Attributes:
        name: As `--steps` has it.
        command: The program and its arguments.
        until: What it must print before the next step; empty where it is run once.
    """

    name: str
    command: list[str]
    until: str = ""

    @property
    def line(self) -> str:
        """The command as a line of a shell script."""
        once = shlex.join(self.command)
        if not self.until:
            return once
        problem = f'echo "step {self.name}: the state is $state, not {self.until}" >&2; exit 1'
        return (
            f'while state="$({once})" || exit; [ "$state" != {self.until} ]; do'
            f' case "$state" in {"|".join(LOST_STATES)}) {problem};; esac; sleep {POLL_S}; done'
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to start, and on what.

    Attributes:
        name: Of the TPU, or of the cluster.
        project: On Google Cloud.
        zone: Where the TPUs are.
        accelerator_type: Such as v5p-1024, of one slice.
        slices: How many.
        capacity: Flags about how the TPUs are paid for.
        runtime_version: Of the TPU VM's software; not of xpk.
        wheel: This project, built; not of xpk.
        image: Container image with this project; of xpk alone.
        grace_s: Seconds from SIGTERM to SIGKILL; of xpk alone.
        training: The run's command, without the interpreter.
        storage: A folder that every host must be able to write.
    """

    name: str
    project: str
    zone: str
    accelerator_type: str
    slices: int = 1
    capacity: tuple[str, ...] = ()
    runtime_version: str = ""
    wheel: Path = Path()
    image: str = ""
    grace_s: int = 300
    training: tuple[str, ...]
    storage: str

    @property
    def where(self) -> list[str]:
        """The flags that every command of gcloud and xpk takes."""
        return [f"--project={self.project}", f"--zone={self.zone}"]

    def on_hosts(self, module: Sequence[str]) -> str:
        """Return a host's shell command for a module of this project; it gets the signals itself."""
        return shlex.join(["exec", f"{VENV}/bin/python", "-m", *module])


def tpu_vm(job: Job) -> list[Step]:
    """List the steps of one slice."""
    gcloud = ["gcloud", "compute", "tpus", "tpu-vm"]
    create = [*gcloud, "create", job.name, *job.where, f"--accelerator-type={job.accelerator_type}"]
    create += [f"--version={job.runtime_version}", *job.capacity]
    delete = [*gcloud, "delete", job.name, *job.where, "--quiet"]
    return [
        Step("create", create),
        *_on_all(job, gcloud, ["--worker=all"]),
        Step("delete", delete),
    ]


def queued(job: Job) -> list[Step]:
    """List the steps of slices that are waited for in a queue."""
    gcloud = ["gcloud", "compute", "tpus", "queued-resources"]
    nodes = [f"--node-id={job.name}"]
    if job.slices > 1:
        nodes = [f"--node-count={job.slices}", f"--node-prefix={job.name}"]
    create = [*gcloud, "create", job.name, *job.where, f"--accelerator-type={job.accelerator_type}"]
    create += [f"--runtime-version={job.runtime_version}", *nodes, *job.capacity]
    describe = [*gcloud, "describe", job.name, *job.where, "--format=value(state.state)"]
    delete = [*gcloud, "delete", job.name, *job.where, "--force", "--quiet"]
    return [
        Step("create", create),
        Step("wait", describe, until="ACTIVE"),
        *_on_all(job, gcloud, ["--worker=all", "--node=all"]),
        Step("delete", delete),
    ]


def _on_all(job: Job, gcloud: list[str], everywhere: list[str]) -> list[Step]:
    """List the steps that copy the wheel to every host, install it, check the hosts and start the run."""

    def ssh(command: str) -> list[str]:
        return [*gcloud, "ssh", job.name, *job.where, *everywhere, f"--command={command}"]

    # The hosts' own Python may be older than this project's; uv brings one.
    install = "python3 -m pip install --quiet --user uv && ~/.local/bin/uv venv --quiet --clear --python 3.12 "
    install += f"{VENV} && ~/.local/bin/uv pip install --quiet --python {VENV}/bin/python "
    install += shlex.quote(f"./{job.wheel.name}[tpu,gcs]")
    return [
        Step("install", [*gcloud, "scp", str(job.wheel), f"{job.name}:", *job.where, *everywhere]),
        Step("install", ssh(install)),
        Step("doctor", ssh(job.on_hosts(["train.doctor", "--storage", job.storage]))),
        Step("run", ssh(job.on_hosts(job.training))),
    ]


def xpk(job: Job) -> list[Step]:
    """List the steps of a workload on GKE; its name is the cluster's with -run."""
    slices = [f"--tpu-type={job.accelerator_type}", f"--num-slices={job.slices}"]
    cluster, workload = [f"--cluster={job.name}", *job.where], f"--workload={job.name}-run"
    run = ["xpk", "workload", "create", *cluster, workload, *slices, f"--docker-image={job.image}"]
    run += [f"--termination-grace-period-seconds={job.grace_s}", f"--max-restarts={MAX_RESTARTS}"]
    # exec, so that the SIGTERM that xpk passes on to its shell reaches the run.
    command = ["exec", "python", "-m", *job.training, f"--restart-status={XPK_RESTARTS}"]
    run += [f"--command={shlex.join(command)}"]
    return [
        Step("cluster", ["xpk", "cluster", "create", *cluster, *slices, *job.capacity]),
        Step("delete-run", ["xpk", "workload", "delete", *cluster, workload, "--force"]),
        Step("run", run),
        Step("delete-cluster", ["xpk", "cluster", "delete", *cluster, "--force"]),
    ]


RECIPES: dict[str, Callable[[Job], list[Step]]] = {TPU_VM: tpu_vm, QUEUED: queued, XPK: xpk}


def run_step(step: Step, poll_s: float = POLL_S) -> None:
    """Run a step and wait for its end.

    Args:
        step: The step.
        poll_s: Seconds between two looks at what is waited for.

    Raises:
        WorkFailedError: If the command fails, or what is waited for will not come.
    """
    sys.stderr.write(f"+ {step.line}\n")
    while True:
        # Where nothing is waited for, what the command prints is shown as it comes.
        done = subprocess.run(
            step.command, stdout=subprocess.PIPE if step.until else None, text=True, check=False
        )
        if done.returncode:
            shown = " ".join(step.command[:5])
            raise WorkFailedError(
                f"step {step.name}: `{shown} ...` ended with exit code {done.returncode}"
            )
        state = done.stdout.strip() if step.until else ""
        if state == step.until:
            return
        if state in LOST_STATES:
            raise WorkFailedError(f"step {step.name}: the state is {state}, not {step.until}")
        sys.stderr.write(f"{state}; looking again in {poll_s:.0f} s\n")
        time.sleep(poll_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; those of this process by default.

    Returns:
        The exit status.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    with command_line.Boundary(resumes=False) as boundary, command_line.sigterm_raises():
        examples = "".join(EXAMPLES.values())
        parser = command_line.Parser(name=NAME, summary=SUMMARY, examples=examples)
        parser.add_argument("recipe", choices=list(RECIPES))
        recipe = parser.first_word(given, "recipe", list(RECIPES))
        args = _parser(recipe).parse_intermixed_args(given[1:])
        for step in _chosen(RECIPES[recipe](_job(recipe, args)), args.steps):
            if args.dry_run:
                sys.stdout.write(f"{step.line}\n")
                continue
            if shutil.which(step.command[0]) is None:
                tool = step.command[0]
                raise UsageError(f"{tool} is not on PATH; it comes with {TOOLS[tool]}")
            boundary.started = True
            run_step(step)
    return boundary.status


def _chosen(steps: list[Step], names: Sequence[str]) -> list[Step]:
    known = list(dict.fromkeys(step.name for step in steps))
    for name in names:
        if name not in known:
            raise UsageError(f"step {name!r} must be one of {', '.join(known)}")
    return [step for step in steps if step.name in names]


def _job(recipe: str, args: argparse.Namespace) -> Job:
    """Check the options, and the config with its overrides before TPUs are paid for."""
    _check_words(recipe, args)
    if args.slices < 1 or (recipe == TPU_VM and args.slices > 1):
        allowed = (
            "be 1: only queued resources and xpk have more" if args.slices > 1 else "be at least 1"
        )
        raise UsageError(f"--slices={args.slices} must {allowed}")
    if args.config.removesuffix(".py") not in config_file.config_names():
        names = ", ".join(config_file.config_names())
        raise UsageError(
            f"--config {args.config}: the hosts have the wheel's or image's only: {names}"
        )
    if not re.fullmatch(r"(gs:/)?/[^/].*", args.workdir):
        raise UsageError(
            f"--workdir {args.workdir} must be gs://BUCKET/..., or an absolute path that all hosts have in common"
        )
    settings = [*args.overrides, "distributed=true"]
    cfg = overrides.apply_overrides(config_file.load_config(args.config), settings)
    with command_line.wrong_usage():
        sharding.fill_axes(cfg.mesh, "dcn", args.slices)
        if devices := _devices(args.accelerator_type):
            sharding.fill_axes(cfg.mesh, "ici", devices)
    on_hosts = {}
    if recipe == XPK:
        on_hosts = {"image": args.image, "grace_s": args.grace_seconds}
    else:
        if not args.wheel.is_file() or args.wheel.suffix != ".whl":
            raise UsageError(
                f"--wheel {args.wheel}: no such wheel; `pip wheel --no-deps -w dist .` builds it"
            )
        on_hosts = {"wheel": args.wheel, "runtime_version": args.runtime_version}
    return Job(
        name=args.name,
        project=args.project,
        zone=args.zone,
        accelerator_type=args.accelerator_type,
        slices=args.slices,
        capacity=tuple(args.capacity),
        training=("train.pretrain", "--config", args.config, "--workdir", args.workdir, *settings),
        storage=args.workdir,
        **on_hosts,
    )


def _check_words(recipe: str, args: argparse.Namespace) -> None:
    """Check what Google Cloud would refuse: an override where the name was forgotten, an empty variable of a shell."""
    if not NAMES.fullmatch(args.name):
        raise UsageError(
            f"name {args.name!r} must be lower-case letters, digits and hyphens, first a letter"
        )
    options = ["project", "zone", "accelerator_type"]
    for option in [*options, "runtime_version"] if recipe != XPK else options:
        if not WORDS.fullmatch(value := getattr(args, option)):
            flag = option.replace("_", "-")
            raise UsageError(
                f"--{flag} {value!r} must be lower-case letters, digits, hyphens, dots"
            )
    if recipe == XPK:
        if not re.fullmatch(r"\S+", args.image):
            raise UsageError(f"--image {args.image!r} must be the name of a container's image")
        if args.grace_seconds < 1:
            raise UsageError(f"--grace-seconds={args.grace_seconds} must be at least 1")


def _devices(accelerator_type: str) -> int | None:
    """Return the devices of a slice; None for a type whose name does not say it."""
    kind, _, size = accelerator_type.partition("-")
    known = kind in TYPE_DEVICES and size.isdecimal()
    return round(int(size) * TYPE_DEVICES[kind]) if known else None


def _parser(recipe: str) -> command_line.Parser:
    parser = command_line.Parser(
        name=f"{NAME} {recipe}", summary=SUMMARIES[recipe], examples=EXAMPLES[recipe]
    )
    parser.add_argument("name", help="of the cluster" if recipe == XPK else "of the TPU")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="fields of the config, as of train.pretrain",
    )
    add = parser.add_argument
    add("--project", required=True, metavar="ID", help="project on Google Cloud")
    add("--zone", required=True, help="where the TPUs are, such as us-east5-a")
    add("--accelerator-type", required=True, metavar="TYPE", help="of a slice, such as v5p-1024")
    add("--slices", type=int, default=1, metavar="N", help="how many (1); set mesh.dcn_data=N too")
    add("--config", required=True, metavar="NAME", help="a config of this project")
    add(
        "--workdir",
        required=True,
        metavar="DIR",
        help="the run's folder, gs://... or one all hosts mount",
    )
    paid = parser.add_mutually_exclusive_group()
    paid.add_argument("--spot", dest="capacity", action="store_const", const=["--spot"],
                      help="cheaper TPUs that can be taken away")  # fmt: skip
    if recipe == XPK:
        paid.add_argument("--reservation", dest="capacity", metavar="ID", help="use a reservation",
                          type=lambda text: [f"--reservation={text}"])  # fmt: skip
        parser.set_defaults(capacity=["--on-demand"])
        add(
            "--image",
            required=True,
            help="container image in which `python -m train.pretrain` runs",
        )
        add("--grace-seconds", type=int, default=300, metavar="S",
            help="from SIGTERM to SIGKILL, in which the run saves (300)")  # fmt: skip
    else:
        paid.add_argument("--reserved", dest="capacity", action="store_const", const=["--reserved"],
                          help="use a reservation")  # fmt: skip
        parser.set_defaults(capacity=[])
        add("--runtime-version", required=True, metavar="V", help="such as v2-alpha-tpuv5")
        add("--wheel", required=True, type=Path, metavar="FILE",
            help="this project, built by `pip wheel --no-deps -w dist .`")  # fmt: skip
    steps = ",".join(DEFAULT_STEPS[recipe])
    add("--steps", type=lambda text: text.split(","), default=DEFAULT_STEPS[recipe], metavar="A,B",
        help=f"which to take, in the recipe's order ({steps})")  # fmt: skip
    add("--dry-run", action="store_true", help="print the commands, run none")
    return parser


if __name__ == "__main__":
    sys.exit(main())
