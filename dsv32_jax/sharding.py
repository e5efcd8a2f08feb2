"""The mesh, the table from logical to mesh axes, and the only places where arrays meet them.

The mesh is set once with `jax.set_mesh`; the functions here read it from the context and do nothing without one, so
that the model runs unchanged on one device. Axis types are Auto: layouts of parameters and activations are stated
and XLA fills in the rest; attention and experts run under shard_map, where every collective is written down.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv32_jax.config import require
from pallas_kernels import dispatch

AXES = ("data", "fsdp", "expert", "tensor", "context")
BATCH_AXES = ("data", "fsdp", "expert")

RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": BATCH_AXES,
    "sequence": ("context",),
    "rows": ("context", "tensor"),  # queries, where every device needs all heads
    "piece": (*BATCH_AXES, "context"),  # tokens of a batch of too few rows; see `fitted`
    "piece_rows": (*BATCH_AXES, "context", "tensor"),
    "cache": BATCH_AXES,  # rows of the paged cache; a page belongs to any sequence
    # parameters
    "embed": ("fsdp", "context", "expert"),
    "expert_embed": (
        "fsdp",
        "context",
    ),  # of the experts' weights, which the expert axis cuts by itself
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "ffn": ("tensor",),
    "experts": ("expert",),
}


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each mesh axis: within a slice (ici) and across slices (dcn); at most one -1 each fills up.

    Attributes:
        ici_data: Copies of the model, within a slice.
        ici_fsdp: Shards of parameters and optimizer state, gathered layer by layer.
        ici_expert: Shards of the experts; tokens travel.
        ici_tensor: Shards of heads, hidden widths and vocabulary.
        ici_context: Shards of the sequence.
        dcn_data: Copies of the model, across slices.
        dcn_fsdp: Shards of parameters, across slices.
        dcn_expert: Shards of the experts, across slices.
        dcn_tensor: Shards of heads and widths, across slices.
        dcn_context: Shards of the sequence, across slices.
    """

    ici_data: int = 1
    ici_fsdp: int = -1
    ici_expert: int = 1
    ici_tensor: int = 1
    ici_context: int = 1
    dcn_data: int = 1
    dcn_fsdp: int = 1
    dcn_expert: int = 1
    dcn_tensor: int = 1
    dcn_context: int = 1

    def __post_init__(self) -> None:
        """Check sizes."""
        for field in fields(self):
            size = getattr(self, field.name)
            require(size == -1 or size >= 1, f"{field.name}={size} must be -1 or at least 1")
        for kind in ("ici", "dcn"):
            filled = [axis for axis in AXES if self.size(kind, axis) == -1]
            require(len(filled) <= 1, f"at most one {kind} axis may be -1, got {filled}")

    def size(self, kind: str, axis: str) -> int:
        """Return the configured size of one axis; kind is "ici" or "dcn"."""
        return getattr(self, f"{kind}_{axis}")


def parse_mesh(text: str) -> MeshConfig:
    """Read a mesh off a command line.

    Args:
        text: Sizes of axes within a slice, such as "tensor=4,expert=2"; what is not named is 1, and at most one may be
            -1 for the devices that are left.

    Returns:
        The mesh.

    Raises:
        ValueError: If an axis is unknown or named twice, or a size is no whole number in range.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or axis in sizes or not size.lstrip("-").isdecimal():
            raise ValueError(
                f"mesh {text!r}: {part!r} must be AXIS=SIZE, once each of {', '.join(AXES)}"
            )
        sizes[axis] = int(size)
    return MeshConfig(**{"ici_fsdp": 1} | {f"ici_{axis}": size for axis, size in sizes.items()})


def fill_axes(cfg: MeshConfig, kind: str, total: int) -> list[int]:
    """Return the sizes of the axes, a -1 replaced by what is left.

    Args:
        cfg: Sizes of the axes.
        kind: "ici" or "dcn".
        total: Devices of a slice, or slices.

    Returns:
        Sizes, in the order of AXES.

    Raises:
        ValueError: If they do not multiply to the total.
    """
    sizes = [cfg.size(kind, axis) for axis in AXES]
    known = math.prod(size for size in sizes if size != -1)
    filled = [total // known if size == -1 else size for size in sizes]
    shape = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    require(
        math.prod(filled) == total,
        f"mesh.{kind}_* axes ({shape}) do not make the {total} "
        f"{'devices' if kind == 'ici' else 'slices'}: {known} must "
        + ("divide it" if -1 in sizes else "equal it"),
    )
    return filled


def make_mesh(cfg: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """Lay the devices out on the axes data, fsdp, expert, tensor, context.

    Args:
        cfg: Sizes of the axes.
        devices: Devices to use; None takes all of them.

    Returns:
        The mesh, Auto axes.

    Raises:
        ValueError: If the sizes do not multiply to the number of devices (or slices).
    """
    devices = jax.devices() if devices is None else devices
    n_slices = len({getattr(device, "slice_index", 0) for device in devices})
    dcn = fill_axes(cfg, "dcn", n_slices)
    ici = fill_axes(cfg, "ici", len(devices) // n_slices)
    if n_slices > 1:
        grid = mesh_utils.create_hybrid_device_mesh(
            ici, dcn, devices=devices, allow_split_physical_axes=True
        )
    else:
        # An axis of 16 on a torus of 8x8x8 takes one of its dimensions and a part of another.
        shape = np.multiply(ici, dcn).tolist()
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Set the context's mesh in a `with` block; None leaves it as it is."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def to_host(x: Any) -> np.ndarray:
    """Return the values of an array, the same on every process; where it is cut over several, all must ask."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def axis_size(*axes: str) -> int:
    """Return how many shards the context's mesh makes along the axes; 1 without a mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in axes)


def spec(*logical: str | None) -> P:
    """Translate logical axes (None: not sharded) to a PartitionSpec by RULES."""
    return P(*(RULES[name] if name else None for name in logical))


def fitted(shape: tuple[int, ...], *logical: str | None) -> P:
    """Translate the logical axes of tokens, batch first, so that the mesh divides them.

    Args:
        shape: Of the array, or its beginning.
        logical: As `spec` takes them, "batch" and another at least.

    Returns:
        `spec(*logical)`. A batch of too few rows for its mesh axes, such as one prompt's piece, is not cut; its tokens
        are, along those axes too, where these divide them.
    """
    if logical[:1] != ("batch",) or shape[0] % axis_size(*RULES["batch"]) == 0:
        return spec(*logical)
    _, second, *rest = logical
    along = {"sequence": "piece", "rows": "piece_rows"}.get(second or "")
    if along and shape[1] % axis_size(*RULES[along]):
        along = None
    return spec(None, along, *rest)


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """State the layout of an activation, `fitted` to its shape; does nothing without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, fitted(x.shape, *logical))


def replicated(tree: Any) -> Any:
    """Give every device, and so every process, the whole of each array."""
    return jax.tree.map(constrain, tree)


def types_checked() -> bool:
    """Tell whether results are checked by types of varying axes: on a CPU only, as those of kernels carry none."""
    return dispatch.platform() == "cpu"


def vary(tree: Any, *logical: str) -> Any:
    """Mark arrays, cut along some logical axes, as different on every device: for types under `shard_map`.

    Gradients of what is the same on several devices are summed over them on the way out.
    """
    axes = {axis for name in logical for axis in RULES[name]}
    missing = tuple(axis for axis in AXES if axis not in axes)
    return jax.lax.pcast(tree, missing, to="varying") if types_checked() else tree


def shard_map(fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Run fn on each device's shard under the context's mesh; plain fn where nothing is sharded.

    Args:
        fn: Function of local arrays.
        in_specs: PartitionSpecs of the arguments; arrays in another layout are resharded first.
        out_specs: PartitionSpecs of the results.

    Returns:
        A function of global arrays.
    """
    if axis_size(*AXES) == 1:
        return fn
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, check_vma=types_checked())


def parameter_shardings(mesh: Mesh | AbstractMesh, tree: Any, logical_axes: Any) -> Any:
    """Return the NamedSharding of every parameter.

    Args:
        mesh: Where they live.
        tree: Tree of arrays or shapes.
        logical_axes: The same tree of tuples of logical axes, one per dimension.

    Returns:
        Tree of NamedSharding. A dimension that all of its mesh axes together do not divide is sharded along the first
        of them that do, or not at all: small models on large meshes still run, with those parameters replicated.
    """

    def one(leaf: Any, logical: tuple[str | None, ...]) -> NamedSharding:
        entries = [
            _dividing(mesh, RULES[name], size) if name else None
            for size, name in zip(leaf.shape, logical, strict=True)
        ]
        return NamedSharding(mesh, P(*entries))

    return jax.tree.map(one, tree, logical_axes)


def _dividing(
    mesh: Mesh | AbstractMesh, axes: tuple[str, ...], size: int
) -> tuple[str, ...] | None:
    """Return the longest beginning of the axes whose shards divide a size."""
    while axes and size % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return axes or None
