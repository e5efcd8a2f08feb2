"""Every mesh that a topology allows for a training step, ranked by what the step is estimated to need on it."""

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from dsv32_jax import sharding
from dsv32_jax.sharding import MeshConfig
from train import pod_steps, step_estimate
from train.pod_report import MARGIN
from train.run_config import RunConfig
from train.step_estimate import Estimate, Load
from train.topology import GIB, Topology

logger = logging.getLogger(__name__)

SEARCHED = ("fsdp", "expert", "tensor", "context")
ACROSS = ("data", "fsdp")  # what slices may differ in; other axes need the links inside a slice
LISTED = 12
SAY_EVERY_S = 5.0


class Candidate(NamedTuple):
    """A mesh, and the microbatches that suit it best.

    Attributes:
        mesh: Sizes of all axes, no -1.
        microbatches: Parts of the batch.
        estimate: What the step needs.
        free: Share of the device memory that is left; negative where it does not fit.
    """

    mesh: MeshConfig
    microbatches: int
    estimate: Estimate
    free: float

    @property
    def fits(self) -> bool:
        """Whether MARGIN is left free."""
        return self.free >= MARGIN

    def settings(self, name: str) -> list[str]:
        """Return what chooses it for a step on a command line."""
        sizes = [f"mesh.ici_{axis}={self.mesh.size('ici', axis)}" for axis in SEARCHED]
        sizes += [
            f"mesh.dcn_{axis}={n}" for axis in ACROSS if (n := self.mesh.size("dcn", axis)) > 1
        ]
        if name == pod_steps.GRPO:
            return [f"--grpo-microbatches {self.microbatches}", *sizes]
        return [*sizes, f"{name}.microbatches={self.microbatches}"]


def search(cfg: RunConfig, load: Load, target: Topology, devices: Sequence[Any]) -> list[Candidate]:
    """Rank the meshes of a topology.

    Args:
        cfg: The run; its mesh is not used.
        load: One of its steps, whose microbatches are not used; where it is a stage the mesh must suit the others too.
        target: The topology.
        devices: Its devices.

    Returns:
        A candidate for each legal mesh: first those that leave MARGIN of the memory free, by the time of a step if
        nothing overlaps, then the others by memory.
    """
    found, said = [], time.monotonic()
    for number, mesh_cfg in enumerate(every := list(meshes(target))):
        if time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            logger.info("%s on %s: %d of %d meshes", load.name, target, number, len(every))
        try:
            mesh = sharding.make_mesh(mesh_cfg, list(devices))
        except NotImplementedError:  # no place on this torus
            continue
        loads = (load._replace(microbatches=m) for m in _divisors(load.rows))
        candidates = []
        for changed in (one for one in loads if _legal(cfg, one, mesh)):
            estimate = step_estimate.estimate(cfg.model, changed, mesh, target.chip)
            free = 1 - estimate.peak_bytes / target.chip.hbm_bytes
            candidates.append(Candidate(mesh_cfg, changed.microbatches, estimate, free))
        if candidates:
            found.append(min(candidates, key=_order))
    return sorted(found, key=_order)


def meshes(target: Topology) -> Iterator[MeshConfig]:
    """List every way to lay a topology's devices out on the axes SEARCHED, and its slices on those of ACROSS.

    Args:
        target: The topology.

    Yields:
        Meshes, no size -1.
    """
    n = target.n_devices // target.slices
    divisors = _divisors(n)
    for across in ACROSS if target.slices > 1 else ACROSS[:1]:
        for fsdp, expert, tensor in itertools.product(divisors, repeat=3):
            if n % (fsdp * expert * tensor) == 0:
                yield MeshConfig(
                    ici_fsdp=fsdp, ici_expert=expert, ici_tensor=tensor,
                    ici_context=n // (fsdp * expert * tensor), **{f"dcn_{across}": target.slices},
                )  # fmt: skip


def table(load: Load, target: Topology, found: Sequence[Candidate]) -> str:
    """Write the ranking for a person.

    Args:
        load: The step.
        target: The topology.
        found: From `search`.

    Returns:
        Lines.
    """
    title = (
        f"{load.name} on {target}, {load.rows} rows of {load.seq_len} tokens: {len(found)} legal meshes, "
        f"{sum(one.fits for one in found)} leave {MARGIN:.0%} of the memory free"
    )
    if not found:
        return (
            f"{title}\n  none: {target.n_devices} devices must divide the heads, the experts, their width, the "
            f"tokens of a row and the rows of a microbatch; try another number of rows"
        )
    head = (
        "  fsdp expert tensor context  slices  microbatches  arguments     peak  free  products   memory    links"
        "     step  tokens/s/chip"
    )
    lines = [title, head]
    for one in found[:LISTED]:
        mesh, times = one.mesh, one.estimate.times
        across = next(
            (f"{a}={mesh.size('dcn', a)}" for a in ACROSS if mesh.size("dcn", a) > 1), "-"
        )
        lines.append(
            f"  {mesh.ici_fsdp:4} {mesh.ici_expert:6} {mesh.ici_tensor:6} {mesh.ici_context:7} {across:>7} "
            f"{one.microbatches:13} {one.estimate.arguments_bytes / GIB:10.2f} {one.estimate.peak_bytes / GIB:8.2f} "
            f"{one.free:5.0%} {times.products_s:9.3g} {times.memory_s:8.3g} {times.links_s:8.3g} "
            f"{times.serial_s:8.3g} {load.tokens / times.serial_s / target.n_chips:14.0f}"
        )
    if len(found) > LISTED:
        lines.append(f"  and {len(found) - LISTED} more in meshes.json")
    lines.append(
        "  GiB and seconds of a device; step: if nothing overlaps. Estimates: compile the first to be sure:"
    )
    lines.append(f"  {' '.join(found[0].settings(load.name))}")
    return "\n".join(lines)


def to_json(found: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Return the candidates as JSON values.

    Args:
        found: From `search`.

    Returns:
        An object each, in order.
    """
    return [
        {
            "mesh": {f"{kind}_{axis}": one.mesh.size(kind, axis) for kind in ("ici", "dcn")
                     for axis in sharding.AXES if one.mesh.size(kind, axis) > 1},
            "microbatches": one.microbatches,
            "free": one.free,
        }
        | {k: v for k, v in one.estimate._asdict().items() if k != "times"}
        | one.estimate.times._asdict()
        for one in found
    ]  # fmt: skip


def _order(one: Candidate) -> tuple[bool, float]:
    return (not one.fits, one.estimate.times.serial_s if one.fits else one.estimate.peak_bytes)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def _legal(cfg: RunConfig, load: Load, mesh: Mesh) -> bool:
    """Ask the steps' own check; a mesh is that of all stages of a run."""
    others = [s for s in cfg.stages if s != load.stage] if load.name in cfg.stages else []
    try:
        for one in (load, *(step_estimate.load_of(cfg, stage) for stage in others)):
            pod_steps.check_mesh(cfg, one, mesh)
    except ValueError:
        return False
    return True
