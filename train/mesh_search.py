"""Every mesh that a topology allows for a training step, ranked by what the step is estimated to need on it."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import Mesh

from dsv32_jax import sharding
from dsv32_jax.sharding import MeshConfig
from train import step_estimate
from train.pod_report import MARGIN
from train.run_config import RunConfig
from train.stage import Stage
from train.step_estimate import Estimate
from train.topology import GIB, Topology

SEARCHED = ("fsdp", "expert", "tensor", "context")
ACROSS = ("data", "fsdp")  # what slices may differ in; other axes need the links inside a slice
LISTED = 12


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

    def settings(self, stage: Stage) -> list[str]:
        """Return the overrides that choose it on a command line."""
        sizes = [f"mesh.ici_{axis}={self.mesh.size('ici', axis)}" for axis in SEARCHED]
        sizes += [
            f"mesh.dcn_{axis}={n}" for axis in ACROSS if (n := self.mesh.size("dcn", axis)) > 1
        ]
        return [*sizes, f"{stage}.microbatches={self.microbatches}"]


def search(
    cfg: RunConfig, stage: Stage, target: Topology, devices: Sequence[Any]
) -> list[Candidate]:
    """Rank the meshes of a topology.

    Args:
        cfg: The run, whose every stage the mesh must suit; its own mesh and the stage's microbatches are not used.
        stage: One of its stages.
        target: The topology.
        devices: Its devices.

    Returns:
        A candidate for each legal mesh: first those that leave MARGIN of the memory free, by the time of a step if
        nothing overlaps, then the others by memory.
    """
    found = []
    for mesh_cfg in meshes(target):
        try:
            mesh = sharding.make_mesh(mesh_cfg, list(devices))
        except NotImplementedError:  # no place on this torus
            continue
        parts = [m for m in _divisors(cfg.stage_data(stage).batch_size)
                 if _legal(_changed(cfg, stage, mesh_cfg, m), mesh)]  # fmt: skip
        if not parts:
            continue
        candidates = []
        for microbatches in parts:
            changed = _changed(cfg, stage, mesh_cfg, microbatches)
            estimate = step_estimate.estimate(changed, stage, mesh, target.chip)
            free = 1 - estimate.peak_bytes / target.chip.hbm_bytes
            candidates.append(Candidate(mesh_cfg, microbatches, estimate, free))
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


def table(cfg: RunConfig, stage: Stage, target: Topology, found: Sequence[Candidate]) -> str:
    """Write the ranking for a person.

    Args:
        cfg: The run.
        stage: The stage.
        target: The topology.
        found: From `search`.

    Returns:
        Lines.
    """
    data = cfg.stage_data(stage)
    title = (
        f"{stage} on {target}, {data.batch_size} rows of {data.seq_len} tokens: {len(found)} legal meshes, "
        f"{sum(one.fits for one in found)} leave {MARGIN:.0%} of the memory free"
    )
    if not found:
        return (
            f"{title}\n  none: {target.n_devices} devices must divide the heads, the experts, their width, the "
            f"tokens of a row and the rows of a microbatch; try another {stage}.batch_size"
        )
    head = (
        "  fsdp expert tensor context  slices  microbatches  arguments     peak  free  products   memory    links"
        "     step  tokens/s/chip"
    )
    lines = [title, head]
    tokens = data.batch_size * data.seq_len
    for one in found[:LISTED]:
        mesh, times = one.mesh, one.estimate.times
        across = next(
            (f"{a}={mesh.size('dcn', a)}" for a in ACROSS if mesh.size("dcn", a) > 1), "-"
        )
        lines.append(
            f"  {mesh.ici_fsdp:4} {mesh.ici_expert:6} {mesh.ici_tensor:6} {mesh.ici_context:7} {across:>7} "
            f"{one.microbatches:13} {one.estimate.arguments_bytes / GIB:10.2f} {one.estimate.peak_bytes / GIB:8.2f} "
            f"{one.free:5.0%} {times.products_s:9.3g} {times.memory_s:8.3g} {times.links_s:8.3g} "
            f"{times.serial_s:8.3g} {tokens / times.serial_s / target.n_chips:14.0f}"
        )
    if len(found) > LISTED:
        lines.append(f"  and {len(found) - LISTED} more in meshes.json")
    lines.append(
        "  GiB and seconds of a device; step: if nothing overlaps. Estimates: compile the first to be sure:"
    )
    lines.append(f"  {' '.join(found[0].settings(stage))}")
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


def _changed(cfg: RunConfig, stage: Stage, mesh: MeshConfig, microbatches: int) -> RunConfig:
    settings = replace(cfg.stage_config(stage), microbatches=microbatches)
    changes: dict[str, Any] = {"mesh": mesh, stage: settings}
    return replace(cfg, **changes)


def _legal(cfg: RunConfig, mesh: Mesh) -> bool:
    """Ask the run's own check."""
    try:
        cfg.check_mesh(mesh)
    except ValueError:
        return False
    return True
