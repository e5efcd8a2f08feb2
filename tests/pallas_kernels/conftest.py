import importlib.util
import os
import re
import subprocess
import tempfile
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

# The smallest topologies that libtpu describes; kernels are compiled for one of their devices.
TPU_TOPOLOGIES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
MAX_COMPILE_SECONDS = 60


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


@pytest.fixture(scope="session", params=TPU_TOPOLOGIES)
def compile_for_tpu(request):
    """Return a function that compiles for a TPU, none is needed: (function, *shapes) -> the compiled object.

    Runs once for each generation. It fails what takes a minute of processor time. `memory_analysis()` counts HBM;
    too much VMEM is an error of the compiler.
    """
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra `tpu`)")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # by several workers of one test run
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    name = TPU_TOPOLOGIES[request.param]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.P())

    def compile_for(fn, *shapes):
        arguments = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes
        )
        jax.config.update("jax_disable_most_optimizations", False)
        began = time.process_time()  # not the clock: others use the machine too
        try:
            with jax.set_mesh(mesh):
                compiled = jax.jit(fn, out_shardings=place).lower(*arguments).compile()
        finally:
            jax.config.update("jax_disable_most_optimizations", True)
        assert time.process_time() - began < MAX_COMPILE_SECONDS
        return compiled

    return compile_for


@pytest.fixture
def races_of_strides(monkeypatch):
    """Let the race detector take strided accesses, which it refuses to compare, for all that they span."""
    from jax._src.pallas.mosaic.interpret import race_detection_state as detector

    compare = detector._slices_overlap

    def spanned(place):
        if not isinstance(place, slice) or place.step in (None, 1):
            return place
        return slice(place.start, range(place.start, place.stop, place.step)[-1] + 1)

    monkeypatch.setattr(detector, "_slices_overlap", lambda a, b: compare(spanned(a), spanned(b)))


@pytest.fixture
def interpret_tpu(races_of_strides):
    """Interpret TPU kernels within the test: memory starts as NaN, copies land when waited for, a race is a failure."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(params):
        yield
    # No public name says whether races were found; jax 0.11 and 0.12 keep it here.
    raced = interpreter.races is not None and interpreter.races.races_found
    pltpu.reset_tpu_interpret_mode_state()
    assert not raced


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
