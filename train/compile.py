"""Compile a run's steps for a TPU pod without the pod, and say what each needs there."""

import argparse
import dataclasses
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from dsv32_jax import command_line, json_files, moe, sharding
from dsv32_jax.config import ModelConfig
from dsv32_jax.convert.storage import Location
from dsv32_jax.errors import UsageError, UserError
from train import command, mesh_search, overrides, pod_report, pod_steps, topology, traced
from train.pod_report import StepReport
from train.pod_steps import GrpoShape, PodStep, ServingShape, Shapes
from train.run_config import RunConfig, check_divides, check_model_on_mesh
from train.topology import Topology

logger = logging.getLogger("train.compile")  # as a command __name__ is __main__

ABOUT = command.CommandHelp(
    name="python -m train.compile",
    summary="Compile the real steps of a run for a TPU pod on a machine without TPUs: memory a device, collectives, "
    "FLOPs and a roofline of each. Exit status 1 if a step does not fit. Needs the extra tpu; minutes a step.",
    examples="""
    python -m train.compile --config v32_671b_sparse.py --topology v5p:8x8x8
    python -m train.compile --config v32_671b_sparse.py --topology v6e:16x16@4 --search
    python -m train.compile --config v32_671b_sparse.py --topology v5p:4x4x4 --steps prefill,decode --slots 128 \
      mesh.ici_expert=16 mesh.ici_tensor=4 mesh.ici_context=1
    python -m train.compile --config sparse_gpu.py --topology v5p:2x2x1 sparse.batch_size=4
    """,
    folder_prefix="compile-",
)
REPORT_FILE, SUMMARY_FILE, MESHES_FILE = "report.txt", "summary.json", "meshes.json"
SAY_EVERY_S = 30.0
# tpu7x runs collectives on its SparseCores, and much of a compilation is code for equal ones. Made once for all of them
# it is another binary of the same memory (a small step: 37 s of processor time, then 28).
COMPILER_OPTIONS: dict[str, dict[str, bool]] = {
    "tpu7x": {"xla_tpu_enable_sparse_core_computation_deduplication": True}
}
VALUES_LISTED = 8


def main(
    cfg: RunConfig,
    workdir: Path,
    *,
    topology_name: str,
    steps: str | None,
    shapes: Shapes,
) -> int:
    """Compile each step in a process of its own, and report.

    Args:
        cfg: The run.
        workdir: Gets report.txt, summary.json, and a log of each compilation.
        topology_name: As `topology.parse` reads it.
        steps: Names with commas between them; None is the run's stages.
        shapes: For what is no stage of the run.

    Returns:
        0 if every step fits, else 1.

    Raises:
        UsageError: If the topology, a step or the mesh cannot be.
    """
    with command_line.wrong_usage():
        target = topology.parse(topology_name)
        names: list[str] = steps.split(",") if steps else list(cfg.stages)
        for name in names:
            pod_steps.check_name(name, cfg)
        mesh = sharding.make_mesh(cfg.mesh, topology.describe(target))
        _check_mesh(cfg, names, shapes, mesh)
    reports, texts = [], []
    for name in names:
        report = _in_a_process(cfg, target, name, shapes, workdir / f"{name}.log")
        reports.append(report)
        smallest = pod_report.smallest_pod(report, target, topology.smaller(target))
        texts.append(pod_report.text(report, target, smallest))
        sys.stdout.write(texts[-1] + "\n")
        json_files.write_json(workdir / SUMMARY_FILE, summary(reports))
    json_files.write_json(workdir / "config.json", overrides.to_json_dict(cfg))
    json_files.write_json(workdir / "steps.json", {r.step: r.to_json() for r in reports})
    json_files.replace_text(workdir / REPORT_FILE, "\n\n".join(texts) + "\n")
    return 0 if all(report.status in ("fits", "tight") for report in reports) else 1


def _check_mesh(cfg: RunConfig, names: list[str], shapes: Shapes, mesh: jax.sharding.Mesh) -> None:
    """Check what the steps ask of the mesh: stages what the run asks, which has one mesh for all."""
    check_model_on_mesh(cfg.model, mesh)
    if set(names) & set(cfg.stages):
        cfg.check_mesh(mesh)
    if pod_steps.GRPO in names:
        pod_steps.check_mesh(cfg, shapes.grpo.load(cfg), mesh)
    if set(names) & set(pod_steps.SERVING):
        check_divides(mesh, shapes.serving.slots, "slots", *sharding.BATCH_AXES)


def summary(reports: list[StepReport]) -> dict[str, Any]:
    """Return the figures a person would quote, one flat object.

    Args:
        reports: Of each step.

    Returns:
        Values by "STEP/name".
    """
    figures: dict[str, Any] = {}
    for report in reports:
        named = {
            "status": report.status,
            "peak_gib": round(report.peak_bytes / topology.GIB, 3),
            "limit_gib": round(report.limit_bytes / topology.GIB, 3),
            "arguments_gib": round(report.arguments_bytes / topology.GIB, 3),
            "model_flops": report.model_flops,
            "compile_s": round(report.compile_s, 1),
            "rss_gib": round(report.rss_bytes / topology.GIB, 3),
        }
        if report.times is not None:
            named |= {f"{name}": round(value, 4) for name, value in report.times._asdict().items()}
        figures |= {f"{report.step}/{name}": value for name, value in named.items()}
    return figures


def search(
    cfg: RunConfig, workdir: Path, *, topology_name: str, steps: str | None, shapes: Shapes
) -> int:
    """Rank the meshes of a topology for each step that trains, and compile nothing.

    Args:
        cfg: The run.
        workdir: Gets report.txt and meshes.json.
        topology_name: As `topology.parse` reads it.
        steps: Names with commas between them; None is the run's stages.
        shapes: For GRPO.

    Returns:
        0 if every step has a mesh on which it is estimated to fit, else 1.

    Raises:
        UsageError: If the topology is unknown, or a step does not train.
    """
    target = topology.parse(topology_name)
    names = steps.split(",") if steps else list(cfg.stages)
    loads = {name: pod_steps.load_of(name, cfg, shapes) for name in names}
    devices = topology.describe(target)
    found = {name: mesh_search.search(cfg, load, target, devices) for name, load in loads.items()}
    texts = [mesh_search.table(loads[name], target, ranked) for name, ranked in found.items()]
    sys.stdout.write("\n\n".join(texts) + "\n")
    json_files.replace_text(workdir / REPORT_FILE, "\n\n".join(texts) + "\n")
    ranked_json = {name: mesh_search.to_json(ranked) for name, ranked in found.items()}
    json_files.write_json(workdir / MESHES_FILE, ranked_json)
    return 0 if all(ranked and ranked[0].fits for ranked in found.values()) else 1


def _in_a_process(
    cfg: RunConfig, target: Topology, name: str, shapes: Shapes, log: Path
) -> StepReport:
    """Compile one step in a new process: the compiler may end its process, and its memory is measured by itself."""
    began, context = time.monotonic(), multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    arguments = (sending, cfg, target, name, shapes, log)
    child = context.Process(target=_compile_and_send, args=arguments, daemon=True)
    before = signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # inherited: Ctrl-C is this process's to report
    child.start()
    signal.signal(signal.SIGINT, before)
    sending.close()
    try:
        while not receiving.poll(SAY_EVERY_S):
            logger.info("%s for %s: %.0f s", name, target, time.monotonic() - began)
        found = receiving.recv()
        child.join()
    except EOFError:
        return StepReport(
            step=name, topology=str(target), mesh={}, limit_bytes=target.chip.hbm_bytes,
            message=f"the compiler's process ended; its last words are in {log}",
        )  # fmt: skip
    finally:
        child.terminate()
        child.join()
    if isinstance(found, Exception):
        raise found
    return found


def _compile_and_send(sending: Connection, *arguments: Any) -> None:
    """Send the report, or an error meant for people; any other ends this process with its traceback in the log."""
    try:
        sending.send(compile_step(*arguments))
    except (ValueError, NotImplementedError, UserError) as error:
        sending.send(error)


def compile_step(
    cfg: RunConfig, target: Topology, name: str, shapes: Shapes, log: Path
) -> StepReport:
    """Trace, lower and compile one step, in this process.

    Args:
        cfg: The run.
        target: The topology.
        name: The step.
        shapes: For what is no stage of the run.
        log: File that gets what libtpu and XLA write to standard error; None leaves it.

    Returns:
        The report.
    """
    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    mesh = sharding.make_mesh(cfg.mesh, topology.describe(target))
    step = pod_steps.build(name, cfg, mesh, shapes)
    report = StepReport(
        step=name,
        topology=str(target),
        mesh={axis: size for axis, size in mesh.shape.items() if size > 1},
        limit_bytes=target.chip.hbm_bytes,
        tokens=step.tokens,
        model_flops=step.model_flops / target.n_devices,
        gradient_bytes=step.gradient_bytes,
    )
    _compile(report, step, target, mesh, cfg.model)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    report.cpu_s, report.rss_bytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
    return report


def _compile(
    report: StepReport, step: PodStep, target: Topology, mesh: jax.sharding.Mesh, model: ModelConfig
) -> None:
    began = time.monotonic()
    with jax.set_mesh(mesh):
        trace = step.jitted.trace(*step.arguments)
        lowered = trace.lower()
        filled = moe.filled(model, step.tokens * model.moe.n_active // mesh.size)
    report.lower_s = time.monotonic() - began
    executed = traced.executed_flops(trace.jaxpr, mesh.size, filled, step.reach)
    report.executed_flops = executed / mesh.size
    began = time.monotonic()
    try:
        compiled = lowered.compile(compiler_options=COMPILER_OPTIONS.get(target.kind))
    except jax.errors.JaxRuntimeError as error:
        report.message = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" in report.message:
            report.status = "does not fit"
            report.peak_bytes = pod_report.bytes_asked_for(report.message)
            values = traced.largest_values(trace.jaxpr, mesh.size, VALUES_LISTED)
            report.live = [
                pod_report.Line(source=v.source, bytes=v.bytes, what=v.shape, count=1)
                for v in values
            ]
    else:
        pod_report.read_compiled(report, compiled, target, mesh, step)
    report.compile_s = time.monotonic() - began


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology",
        metavar="KIND:SHAPE[@SLICES]",
        required=True,
        help=f"what to compile for: {', '.join(topology.CHIPS)}, such as v5p:8x8x8 or v6e:16x16@4",
    )
    parser.add_argument(
        "--steps",
        metavar="NAME,...",
        help="stages of the config, grpo, prefill, decode (default: the config's stages)",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="rank every mesh of the topology by an estimate, in seconds; compiles nothing",
    )
    serving, grpo = ServingShape(), GrpoShape()
    for shape, name, said in (
        (serving, "slots", "sequences decoded at once"),
        (serving, "max_len", "tokens of their context"),
        (serving, "prefill_chunk", "tokens of a prompt run at once"),
        (grpo, "rows", "rows of packed rollouts in a step of GRPO"),
        (grpo, "row_length", "tokens of such a row"),
        (grpo, "microbatches", "parts the rows are worked on in"),
        (grpo, "responses", "rollouts of a row"),
        (grpo, "response_tokens", "tokens of the longest response"),
        (grpo, "kept_tokens", "entries of a row's kept sets, 0 for none"),
    ):
        prefix = "grpo_" if shape is grpo else ""
        parser.add_argument(
            f"--{prefix}{name}".replace("_", "-"),
            type=int,
            metavar="N",
            default=getattr(shape, name),
            help=f"{said} (%(default)s)",
        )


def _run(cfg: RunConfig, workdir: Location, args: argparse.Namespace) -> int:
    os.environ.update(topology.LIBTPU_ENVIRONMENT, JAX_PLATFORMS="cpu")  # of compiling processes
    jax.config.update("jax_platforms", "cpu")
    with command_line.wrong_usage():
        grpo = {f.name: getattr(args, f"grpo_{f.name}") for f in dataclasses.fields(GrpoShape)}
        shapes = Shapes(
            ServingShape(slots=args.slots, max_len=args.max_len, prefill_chunk=args.prefill_chunk),
            GrpoShape(**grpo),
        )
    if not isinstance(cfg, RunConfig):
        raise UsageError(f"--config {args.config} is no run of stages")
    if not isinstance(workdir, Path):
        raise UsageError(f"workdir {workdir}: the compiler's logs go to a folder of this machine")
    if args.search:
        return search(cfg, workdir, topology_name=args.topology, steps=args.steps, shapes=shapes)
    return main(cfg, workdir, topology_name=args.topology, steps=args.steps, shapes=shapes)


if __name__ == "__main__":
    sys.exit(command.run_command(_run, about=ABOUT, add_options=_add_options))
