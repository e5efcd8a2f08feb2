"""TPU topologies by name, such as `v5p:8x8x8` or `v6e:16x16@4`: the devices a program is compiled for, without them."""

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from dsv32_jax.errors import UsageError

GIB = 2**30
# More are no topology that anybody means, and libtpu describes any number until it runs out of memory.
MAX_DEVICES = 2**16
# What libtpu asks a machine without a TPU about; answered here so that it neither waits nor warns.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of TPU; every figure is for one device as JAX counts them, which on tpu7x is half a chip.

    Attributes:
        flops: Peak of bfloat16 products, FLOP/s.
        hbm_bytes_per_s: Bandwidth of device memory.
        hbm_bytes: Device memory that the compiler gives a program.
        link_bytes_per_s: One link of the torus, one direction.
        dcn_bytes_per_s: Out of the device to other slices.
        dims: Dimensions of the torus.
        devices: Devices of a chip.
        shapes: Slices that can be asked for, small to large: where the smallest pod is looked for.

    Source: cloud.google.com/tpu/docs (v5e, v5p, v6e, tpu7x), where a chip's interconnect is the sum over its links and
    both ways; hbm_bytes is the limit that libtpu 0.0.48's compiler names; dcn_bytes_per_s is from "How to Scale Your
    Model", as are the links' rates (90% of the printed sum).
    """

    flops: float
    hbm_bytes_per_s: float
    hbm_bytes: float
    link_bytes_per_s: float
    dcn_bytes_per_s: float
    dims: int
    devices: int
    shapes: tuple[str, ...]


CHIPS: dict[str, Chip] = {
    "v5e": Chip(
        flops=197e12,
        hbm_bytes_per_s=819e9,
        hbm_bytes=15.75 * GIB,
        link_bytes_per_s=45e9,
        dcn_bytes_per_s=3.1e9,
        dims=2,
        devices=1,
        shapes=("2x2", "4x4", "4x8", "8x8", "8x16", "16x16"),
    ),
    "v5p": Chip(
        flops=459e12,
        hbm_bytes_per_s=2765e9,
        hbm_bytes=95.73 * GIB,
        link_bytes_per_s=90e9,
        dcn_bytes_per_s=6.2e9,
        dims=3,
        devices=1,
        shapes=("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16",
                "8x16x16", "16x16x16"),
    ),
    "v6e": Chip(
        flops=918e12,
        hbm_bytes_per_s=1640e9,
        hbm_bytes=31.24 * GIB,
        link_bytes_per_s=90e9,
        dcn_bytes_per_s=12.5e9,
        dims=2,
        devices=1,
        shapes=("2x2", "4x4", "4x8", "8x8", "8x16", "16x16"),
    ),
    "tpu7x": Chip(
        flops=2307e12 / 2,
        hbm_bytes_per_s=7380e9 / 2,
        hbm_bytes=94.74 * GIB,
        link_bytes_per_s=90e9 / 2,
        dcn_bytes_per_s=6.2e9,
        dims=3,
        devices=2,
        shapes=("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Slices of TPU chips.

    Attributes:
        kind: A key of CHIPS.
        shape: Chips along each dimension of a slice.
        slices: How many slices.
    """

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chip(self) -> Chip:
        """What one device can do."""
        return CHIPS[self.kind]

    @property
    def n_chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def n_devices(self) -> int:
        """Devices of all slices, as JAX counts them."""
        return self.n_chips * self.chip.devices

    def __str__(self) -> str:
        """Return the name that `parse` reads."""
        many = f"@{self.slices}" if self.slices > 1 else ""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}{many}"


def parse(text: str) -> Topology:
    """Read a topology off a command line.

    Args:
        text: KIND:SHAPE, with @N for N slices: "v5p:8x8x8", "v6e:16x16@4".

    Returns:
        The topology.

    Raises:
        UsageError: If the text is not of that form, the kind of TPU or its number of dimensions is unknown, or there
            are more devices than MAX_DEVICES.
    """
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)+)(?:@(\d+))?", text)
    if match is None:
        raise UsageError(
            f"topology {text!r} must be KIND:SHAPE, such as v5p:8x8x8, or v6e:16x16@4 for four slices"
        )
    kind, shape = match[1], tuple(map(int, match[2].split("x")))
    slices = int(match[3] or 1)
    if kind not in CHIPS:
        raise UsageError(f"topology {text!r}: {kind} must be one of {', '.join(CHIPS)}")
    if len(shape) != CHIPS[kind].dims:
        raise UsageError(f"topology {text!r}: a slice of {kind} has {CHIPS[kind].dims} dimensions")
    if 0 in (*shape, slices):
        raise UsageError(f"topology {text!r}: no size may be 0")
    topology = Topology(kind=kind, shape=shape, slices=slices)
    if topology.n_devices > MAX_DEVICES:
        raise UsageError(
            f"topology {text!r}: {topology.n_devices} devices are more than {MAX_DEVICES}"
        )
    return topology


def describe(topology: Topology) -> list[Any]:
    """Return the topology's devices, which programs can be compiled for and not run on.

    Args:
        topology: The topology.

    Returns:
        JAX devices.

    Raises:
        UsageError: If libtpu is not installed or knows no such slice.
    """
    from jax.experimental import topologies  # loads libtpu only where it is needed

    os.environ.update(LIBTPU_ENVIRONMENT)
    name = str(Topology(kind=topology.kind, shape=topology.shape))
    slices = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError(f"topology {topology}: needs libtpu, pip install dsv32-jax[tpu]")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **slices).devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        shapes = ", ".join(topology.chip.shapes)
        raise UsageError(
            f"topology {topology}: libtpu knows no such slice; shapes of {topology.kind} are {shapes} ({line})"
        ) from error


def smaller(topology: Topology) -> list[Topology]:
    """List the slices of the same kind with fewer chips, large to small."""
    shapes = (tuple(map(int, shape.split("x"))) for shape in topology.chip.shapes)
    slices = (Topology(kind=topology.kind, shape=shape) for shape in shapes)
    return sorted(
        (one for one in slices if one.n_chips < topology.n_chips), key=lambda one: -one.n_chips
    )
