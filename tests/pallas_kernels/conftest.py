import re
import subprocess
import tempfile
from typing import NamedTuple

import jax
import numpy as np
import pytest


class HopperKernel(NamedTuple):
    """What the compilers made of a Gluon kernel."""

    ptx: str
    sass: str
    spilled_bytes: int
    warnings: list[str]  # of ptxas; one says that it serialises the products
    shared_bytes: int
    num_warps: int  # with the worker partitions'


@pytest.fixture(scope="session", autouse=True)
def quick_compiles():
    """Compile without most optimizations: these shapes are tiny and compiling is nearly all of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def calc_diff():
    """Return the low-precision metric `1 - 2<x,y>/(<x,x>+<y,y>)` in float64, 0 for equal arrays."""

    def diff(x, y):
        x, y = (np.asarray(a, np.float32).astype(np.float64) for a in (x, y))
        return 1 - 2 * np.sum(x * y) / (np.sum(x * x) + np.sum(y * y))

    return diff


@pytest.fixture(scope="session")
def compile_for_hopper():
    """Return a function that compiles a Gluon kernel, four warps, for sm_90a; no GPU is needed.

    It takes the kernel, Triton's types of its pointers and scalars as two strings of words, and its constants.
    """
    pytest.importorskip("triton")
    from triton import knobs

    from pallas_kernels import gluon_call

    def compile_kernel(kernel, pointers, scalars, constants):
        compiled = gluon_call.compile_kernel(
            kernel, pointers.split(), scalars.split(), constants, num_warps=4
        )
        command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", "-o", "/dev/null", "-"]
        ptx = compiled.asm["ptx"]
        report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True)
        (spilled,) = re.findall(r"(\d+) bytes spill stores", report.stderr)
        warnings = [line for line in report.stderr.splitlines() if "Performance Loss" in line]
        meta = compiled.metadata
        return HopperKernel(
            ptx,
            disassemble(compiled.asm["cubin"]),
            int(spilled),
            warnings,
            meta.shared,
            meta.num_warps,
        )

    # Triton's own `asm["sass"]` stops at 64 KiB of code.
    def disassemble(cubin):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return compile_kernel


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def draw_ranges():
    """Return random causal key ranges [T] or [B, T]: documents that start late, some empty rows."""

    def draw(rng, shape, n_keys, *, empty=True):
        end = np.minimum(np.arange(1, shape[-1] + 1) + max(n_keys - shape[-1], 0), n_keys)
        end = np.broadcast_to(end, shape).astype(np.int32)
        start = (end * rng.uniform(0, 1, shape) ** 3).astype(np.int32)
        start = np.minimum(start, np.maximum(end - 1, 0))
        if empty and shape[-1] > 2:
            start[..., 2] = end[..., 2]
        return start, end

    return draw
