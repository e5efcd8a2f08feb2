"""Call a Gluon kernel from JAX: compile it with Triton's own Gluon stages, launch it through jaxlib's Triton call."""

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

CALL_TARGET = "triton_kernel_call_ffi"
HOPPER = 90
POINTER_ALIGNMENT = 16  # bytes; XLA aligns buffers to 128 or more
TRITON_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
    "int32": "i32",
    "uint32": "u32",
    "int64": "i64",
}


def scalar_type(value: int | float) -> str:
    """Return Triton's type of a launch argument: fp32, or the narrowest signed integer that holds it."""
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_kernel(
    kernel: Any,
    pointer_types: Sequence[str],
    scalar_types: Sequence[str],
    constants: Mapping[str, Any],
    *,
    num_warps: int,
    max_registers: int | None = None,
) -> Any:
    """Compile a Gluon kernel for Hopper; no GPU is needed.

    The kernel's parameters are pointers, then run-time scalars, then constexprs.

    Args:
        kernel: A function decorated with `gluon.jit`.
        pointer_types: Triton element type of each pointer, such as "bf16".
        scalar_types: Triton type of each scalar, "i32", "i64" or "fp32".
        constants: Value of every constexpr parameter that has no default.
        num_warps: Warps of the default partition; worker partitions add theirs.
        max_registers: Registers a thread at entry, or None for the compiler's choice.

    Returns:
        Triton's CompiledKernel: `asm["ptx"]`, `asm["cubin"]`, and `metadata` whose `num_warps` counts all warps.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = [p.name for p in kernel.params]
    runtime_types = [f"*{t}" for t in pointer_types] + list(scalar_types)
    signature = dict.fromkeys(names, "constexpr")
    signature.update(zip(names, runtime_types, strict=False))
    defaults = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default}
    attributes = {(i,): [["tt.divisibility", POINTER_ALIGNMENT]] for i in range(len(pointer_types))}
    # Differs from jax-triton 0.4.1, which runs Triton's own TTIR and TTGIR passes over Gluon modules and so loses the
    # asynchrony written in the kernel, and which launches `num_warps` warps without the worker partitions'.
    source = GluonASTSource(kernel, signature, defaults | dict(constants), attributes)
    options: dict[str, Any] = {"num_warps": num_warps}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    return triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options)


@functools.lru_cache(maxsize=256)
def _compiled(
    kernel: Any,
    pointer_types: tuple[str, ...],
    scalar_types: tuple[str, ...],
    constants: tuple[tuple[str, Any], ...],
    num_warps: int,
) -> Any:
    return compile_kernel(kernel, pointer_types, scalar_types, dict(constants), num_warps=num_warps)


def gluon_call(
    kernel: Any,
    *arrays: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    scalars: Sequence[int | float] = (),
    num_warps: int = 4,
    zeroed: Sequence[int] = (),
    aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """Launch a Gluon kernel on arrays inside or outside `jax.jit`.

    The kernel takes pointers to `arrays`, pointers to the outputs, `scalars`, then `constants` by name. It has no
    derivative and no sharding rule: wrap it in `jax.custom_vjp` and call it under `jax.shard_map`.

    Args:
        kernel: A function decorated with `gluon.jit`.
        *arrays: Inputs, row-major.
        out: Shape and dtype of each output; memory is not initialised.
        grid: Up to three numbers of programs, each at least 1.
        constants: Constexpr parameters, hashable.
        scalars: Run-time scalars of the launch; floats are float32.
        num_warps: Warps of the default partition.
        zeroed: Which outputs to fill with zero bytes before the launch.
        aliases: Output that shares the memory of an input, by the input's number; the kernel gets both pointers.

    Returns:
        The outputs.

    Raises:
        NotImplementedError: If triton or jax's CUDA plugin is not installed.
    """
    try:
        import triton  # noqa: F401
        from jaxlib import gpu_triton
    except ImportError as error:
        raise NotImplementedError(f"Gluon kernels need triton: {error}") from error
    if not hasattr(gpu_triton, "TritonKernel"):
        raise NotImplementedError(
            "Gluon kernels need jax with its CUDA plugin: pip install jax[cuda13]"
        )
    outputs = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in out]
    dtypes = [jnp.dtype(a.dtype) for a in arrays] + [jnp.dtype(o.dtype) for o in outputs]
    pointer_types = tuple(TRITON_TYPES[dtype.name] for dtype in dtypes)
    scalar_types = tuple(scalar_type(s) for s in scalars)
    compiled = _compiled(
        kernel, pointer_types, scalar_types, tuple(sorted(constants.items())), num_warps
    )
    parameters = [gpu_triton.create_array_parameter(0, POINTER_ALIGNMENT) for _ in arrays]
    for i, o in enumerate(outputs):
        n_zeroed = o.size * o.dtype.itemsize if i in zeroed else 0
        parameters.append(gpu_triton.create_array_parameter(n_zeroed, POINTER_ALIGNMENT))
    for value, name in zip(scalars, scalar_types, strict=True):
        parameters.append(gpu_triton.create_scalar_parameter(value, name))
    launch = gpu_triton.TritonKernelCall(
        _launchable(gpu_triton, compiled), *grid, *(1,) * (3 - len(grid)), parameters
    )
    opaque = zlib.compress(launch.to_proto(compiled.metadata.name, b""))
    call = jax.ffi.ffi_call(
        CALL_TARGET,
        outputs,
        vmap_method="sequential",
        input_output_aliases=None if aliases is None else dict(aliases),
    )
    return list(call(*arrays, opaque=opaque))


def _launchable(gpu_triton: Any, compiled: Any) -> Any:
    """Return jaxlib's form of a compiled kernel; its warps include the worker partitions'."""
    meta = compiled.metadata
    arguments = [meta.name, meta.num_warps, meta.num_ctas, meta.shared, compiled.asm["ptx"]]
    arguments += ["", HOPPER]
    if meta.global_scratch_size:
        arguments += [meta.global_scratch_size, meta.global_scratch_align]
    return gpu_triton.TritonKernel(*arguments)
